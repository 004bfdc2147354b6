"""Colours and line styles, once for the page (light and dark) and for figures on paper."""

from __future__ import annotations

from dataclasses import dataclass

# Text and marks reach WCAG AA (4.5:1 and 3:1); the eight series, and clean and noisy,
# stay apart for people without one kind of cone. Tests compute both.
LIGHT = {
    "paper": "#fdfdfb",
    "panel": "#f4f4f0",
    "ink": "#1c2227",
    "soft": "#555f67",
    "line": "#d9dbd6",
    "accent": "#0b6078",
    "clean": "#2a7f9e",
    "noisy": "#c2500a",
    "unknown": "#6f7982",
    "heat": "#0a4a5e",
    "band": "#f1f2ec",
    "s1": "#0b6078",
    "s2": "#c2500a",
    "s3": "#642a9f",
    "s4": "#7a3720",
    "s5": "#9085df",
    "s6": "#ae8578",
    "s7": "#131349",
    "s8": "#300d16",
}
DARK = {
    "paper": "#15191c",
    "panel": "#1e2327",
    "ink": "#e8e6e1",
    "soft": "#a5adb3",
    "line": "#343b41",
    "accent": "#67c1d9",
    "clean": "#5fb3cf",
    "noisy": "#f08b4b",
    "unknown": "#939ca4",
    "heat": "#8ad8ec",
    "band": "#1b2024",
    "s1": "#67c1d9",
    "s2": "#f08b4b",
    "s3": "#8b48ce",
    "s4": "#e5dc9e",
    "s5": "#8a9c8c",
    "s6": "#8f5a3a",
    "s7": "#c2efde",
    "s8": "#367084",
}
SERIES = 8
HEAT_STEPS = 100  # coarser ones fall below 4.5:1 where black text gives way to white
# Colour is never the only difference.
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4", "4 2", "12 3 2 3")


@dataclass(frozen=True)
class Style:
    """How a mark looks: names of colours, not colours, so that each theme has its own."""

    fill: str | None = None
    stroke: str | None = None
    width: float = 1.0
    opacity: float = 1.0
    fill_opacity: float = 1.0
    dash: str = ""
    bold: bool = False


STYLES = {
    "grid": Style(stroke="line"),
    "axis": Style(stroke="soft"),
    "tick": Style(fill="soft"),
    "name": Style(fill="ink"),
    "strong": Style(fill="ink", bold=True),
    "band": Style(fill="band"),
    "frame": Style(stroke="line"),
    "clean": Style(fill="clean", stroke="paper", width=0.5),
    "noisy": Style(fill="noisy", stroke="paper", width=0.5),
    "unknown": Style(fill="unknown", stroke="paper", width=0.5),
    "accent": Style(fill="accent", stroke="paper", width=0.5),
    "muted": Style(fill="unknown", stroke="paper", width=0.5, opacity=0.55),
    "hollow": Style(fill="paper", stroke="unknown", width=1.5),
    "ring": Style(stroke="ink", width=1.6),
    "heat": Style(fill="heat"),
    "gap": Style(stroke="unknown", width=1),
    "cleanline": Style(stroke="clean", width=1, opacity=0.5),
    "noisyline": Style(stroke="noisy", width=1, opacity=0.55, dash="4 2"),
    "unknownline": Style(stroke="unknown", width=1, opacity=0.4),
    "cleanmean": Style(stroke="clean", width=2.4),
    "noisymean": Style(stroke="noisy", width=2.4, dash="7 3"),
    "unknownmean": Style(stroke="unknown", width=2.4),
    "cleanarea": Style(fill="clean", stroke="clean", width=1, fill_opacity=0.1),
    "noisyarea": Style(fill="noisy", stroke="noisy", width=1, fill_opacity=0.1, dash="4 2"),
    "curve": Style(stroke="accent", width=2.2),
    "curve2": Style(stroke="noisy", width=1.6, dash="5 3"),
    "mark": Style(stroke="ink", width=1, dash="3 3"),
    "span": Style(fill="accent", fill_opacity=0.1),
    "link": Style(stroke="unknown", width=1.5, opacity=0.6),
    "hit": Style(fill="ink", fill_opacity=0.0),
    **{
        f"series{i}": Style(stroke=f"s{i}", width=2.2, dash=DASHES[i - 1])
        for i in range(1, SERIES + 1)
    },
    **{f"spread{i}": Style(fill=f"s{i}", fill_opacity=0.13) for i in range(1, SERIES + 1)},
    **{f"dot{i}": Style(fill=f"s{i}", stroke="paper", width=0.5) for i in range(1, SERIES + 1)},
}


def mix(colour: str, paper: str, share: float) -> tuple[float, float, float]:
    """What is seen where `colour` covers `paper` by `share`, as red, green, blue in 0..255."""
    top, below = _channels(colour), _channels(paper)
    red, green, blue = (share * a + (1 - share) * b for a, b in zip(top, below, strict=True))
    return red, green, blue


def contrast(first: tuple[float, float, float], second: tuple[float, float, float]) -> float:
    """The contrast ratio of WCAG 2, from 1 to 21."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def on_heat(share: float, theme: dict[str, str]) -> str:
    """Black or white: what reads better on a heat cell of this share.
    Nothing else reaches 4.5:1 on every shade.
    """
    cell = mix(theme["heat"], theme["paper"], share)
    return max("#000000", "#ffffff", key=lambda colour: contrast(cell, _channels(colour)))


def css() -> str:
    """The palette as custom properties and the styles as classes;
    text on heat cells by its share.
    """
    lines = [f":root{{color-scheme:light;{_variables(LIGHT)}}}"]
    lines.append(
        "@media screen "
        f"and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{_variables(DARK)}}}}}"
    )
    lines.append(
        f"@media screen{{:root[data-theme=light]{{color-scheme:light;{_variables(LIGHT)}}}"
    )
    lines.append(f":root[data-theme=dark]{{color-scheme:dark;{_variables(DARK)}}}}}")
    lines += [f"svg .{name}{{{_rules(style)}}}" for name, style in STYLES.items()]
    lines += [f"svg .h{step}{{fill:var(--h{step})}}" for step in range(HEAT_STEPS + 1)]
    return "\n".join(lines)


def _variables(theme: dict[str, str]) -> str:
    text = {f"h{step}": on_heat(step / HEAT_STEPS, theme) for step in range(HEAT_STEPS + 1)}
    return "".join(f"--{name}:{colour};" for name, colour in {**theme, **text}.items())


def _rules(style: Style) -> str:
    rules = [f"fill:{f'var(--{style.fill})' if style.fill else 'none'}"]
    if style.stroke:
        rules.append(f"stroke:var(--{style.stroke});stroke-width:{style.width:g}")
    for name, value in (("opacity", style.opacity), ("fill-opacity", style.fill_opacity)):
        rules += [f"{name}:{value:g}"] if value != 1 else []
    rules += [f"stroke-dasharray:{style.dash}"] if style.dash else []
    rules += ["font-weight:600"] if style.bold else []
    return ";".join(rules)


def _channels(colour: str) -> tuple[float, float, float]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(channels: tuple[float, float, float]) -> float:
    def linear(value: float) -> float:
        value /= 255
        return value / 12.92 if value <= 0.03928 else float(((value + 0.055) / 1.055) ** 2.4)

    red, green, blue = map(linear, channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
