"""What the paper reports: Wu et al., FedNoRo, IJCAI 2023, Tables 1 to 4, in percent."""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    """One kind of label noise: ρ, and η between low and high on the noisy clients."""

    rate: float
    low: float
    high: float

    @property
    def slug(self) -> str:
        """For names of files."""
        return f"rho{self.rate:g}" + (f"-eta{self.low:g}-{self.high:g}" if self.rate else "")


MILD, STRONG = (0.3, 0.5), (0.5, 0.7)
CLEAN = Setting(0.0, 0.0, 0.0)

TITLES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedla": "FedLA",
    "rofl": "RoFL",
    "rhfl": "RHFL",
    "fedlsr": "FedLSR",
    "fedcorr": "FedCorr",
    "fedcorr-la": "FedCorr+LA",
    "fednoro": "FedNoRo",
}


def _settings(rates: tuple[float, ...], *ranges: tuple[float, float]) -> tuple[Setting, ...]:
    return (CLEAN, *(Setting(rate, *eta) for rate in rates for eta in ranges))


GRIDS = {
    "ich": _settings((0.2, 0.3, 0.4, 0.6), MILD, STRONG),
    "isic2019": _settings((0.4, 0.6), STRONG),
}

# Best and Last of each column of `GRIDS`;
# methods that have no figure for ρ = 0 begin with the second column.
_TABLE_1 = {
    "fedavg": (
        (69.34, 65.81, 64.53, 62.49, 60.82, 60.52, 58.38, 58.46, 54.77),
        (68.92, 65.33, 63.97, 62.10, 60.23, 60.05, 56.79, 56.88, 50.35),
    ),
    "fedprox": (
        (68.16, 64.58, 63.64, 61.81, 61.91, 60.85, 58.50, 60.21, 57.57),
        (67.29, 63.80, 62.65, 61.46, 61.00, 59.99, 57.85, 59.35, 56.63),
    ),
    "fedla": (
        (73.56, 69.45, 69.28, 66.84, 64.84, 66.60, 62.39, 63.90, 58.78),
        (73.07, 68.82, 68.45, 66.20, 64.03, 63.90, 60.51, 61.86, 54.99),
    ),
    "rofl": (
        (42.57, 40.42, 40.95, 39.87, 40.35, 35.60, 40.18, 35.47),
        (42.19, 40.30, 40.64, 39.27, 40.25, 35.39, 39.68, 35.35),
    ),
    "rhfl": (
        (57.48, 56.91, 56.72, 55.74, 55.26, 54.30, 54.63, 51.00),
        (57.05, 56.46, 55.75, 52.19, 54.71, 52.08, 52.53, 49.64),
    ),
    "fedlsr": (
        (55.99, 55.28, 54.44, 52.27, 52.48, 48.20, 50.89, 43.30),
        (55.69, 54.77, 53.95, 51.70, 51.92, 46.77, 49.96, 39.81),
    ),
    "fedcorr": (
        (57.90, 56.68, 55.02, 54.61, 53.62, 50.82, 50.89, 47.13),
        (57.68, 55.86, 54.52, 53.62, 52.60, 49.59, 50.24, 46.13),
    ),
    "fedcorr-la": (
        (64.78, 64.29, 62.58, 62.78, 62.19, 60.06, 57.88, 54.53),
        (63.99, 63.55, 61.90, 61.87, 61.30, 59.58, 57.17, 53.92),
    ),
    "fednoro": (
        (70.59, 70.64, 70.14, 69.35, 70.69, 69.30, 67.55, 63.83),
        (70.18, 69.81, 69.29, 68.47, 70.14, 68.87, 67.10, 63.29),
    ),
}
_TABLE_2 = {
    "fedavg": ((69.09, 61.83, 54.35), (65.44, 58.23, 49.88)),
    "fedprox": ((72.20, 64.46, 58.55), (69.60, 60.13, 49.87)),
    "fedla": ((72.55, 66.34, 61.20), (68.72, 61.18, 56.11)),
    "rofl": ((28.45, 28.86), (27.79, 28.29)),
    "rhfl": ((46.06, 46.67), (44.04, 45.09)),
    "fedlsr": ((30.15, 27.24), (29.11, 26.08)),
    "fedcorr": ((42.54, 38.40), (41.12, 37.17)),
    "fedcorr-la": ((60.38, 55.40), (59.16, 54.27)),
    "fednoro": ((68.59, 66.00), (64.67, 60.65)),
}


class BestLast(NamedTuple):
    """Balanced accuracy over rounds: the best, and the mean of the last ten."""

    best: float
    last: float


def _by_setting(
    grid: tuple[Setting, ...], table: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]
) -> dict[tuple[str, Setting], BestLast]:
    return {
        (method, setting): BestLast(*pair)
        for method, (best, last) in table.items()
        for setting, *pair in zip(grid[len(grid) - len(best) :], best, last, strict=True)
    }


BACC = {
    "ich": _by_setting(GRIDS["ich"], _TABLE_1),
    "isic2019": _by_setting(GRIDS["isic2019"], _TABLE_2),
}

# Table 3, on ICH: (indicator of `fednoro.detection.indicators`, with LA) → recall,
# precision, matching ratio.
TABLE_3 = {
    Setting(0.3, *MILD): {
        ("lid", False): (100.00, 54.54, 0.00),
        ("confidence", False): (16.66, 8.33, 0.00),
        ("loss", False): (94.58, 57.12, 0.00),
        ("loss", True): (100.00, 47.14, 0.00),
        ("per_class", False): (97.19, 90.63, 85.77),
        ("per_class", True): (99.48, 97.78, 96.93),
        ("per_class_norm", True): (99.70, 98.76, 98.28),
    },
    Setting(0.4, *MILD): {
        ("lid", False): (87.50, 63.63, 0.00),
        ("confidence", False): (37.50, 25.00, 0.00),
        ("loss", False): (78.80, 60.57, 0.00),
        ("loss", True): (89.41, 80.46, 0.00),
        ("per_class", False): (65.77, 100.00, 37.58),
        ("per_class", True): (81.10, 100.00, 47.09),
        ("per_class_norm", True): (90.23, 100.00, 88.82),
    },
}

# Table 4: the setting of each data set, and each row's Best and Last there.
TABLE_4_SETTINGS = {"ich": Setting(0.4, *MILD), "isic2019": Setting(0.6, *STRONG)}
TABLE_4 = {
    "ich": {
        "fedla": BestLast(66.60, 63.90),
        "clean-only": BestLast(69.67, 68.07),
        "daagg-only": BestLast(69.32, 68.18),
        "kd-only": BestLast(64.53, 64.01),
        "fednoro": BestLast(70.69, 70.14),
    },
    "isic2019": {
        "fedla": BestLast(61.20, 56.11),
        "clean-only": BestLast(64.94, 59.17),
        "daagg-only": BestLast(65.72, 58.60),
        "kd-only": BestLast(60.79, 43.57),
        "fednoro": BestLast(66.00, 60.65),
    },
}
