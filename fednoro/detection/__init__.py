"""Who is noisy, and how sure that is: detectors and what they are made of."""

from __future__ import annotations

from fednoro.detection.mixture_detector import NoisyClientDetector

__all__ = ["NoisyClientDetector"]
