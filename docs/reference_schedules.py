"""The picture of the learning-rate schedules, drawn from litgpt_demo/schedules.py."""

from __future__ import annotations

from litgpt_demo.config import TrainConfig
from litgpt_demo.schedules import DECAY_SHAPES, SCHEDULES, learning_rate_at

STEPS, WARMUP = 200, 0.1
WIDTH, HEIGHT, MARGIN = 260, 130, 48
"""Size of one curve and the space around it, in pixels."""


def schedules() -> str:
    """Return an SVG with a curve for each schedule and shape, two in a row. Its colors suit a light and a dark page."""
    curves = list[tuple[str, TrainConfig]]()
    for name, schedule in SCHEDULES.items():
        train = TrainConfig(schedule=name, learning_rate=1.0, warmup_steps=WARMUP)
        curves.append((name, train))
        if "decay_shape" in schedule.settings:
            others = [shape for shape in DECAY_SHAPES if shape != train.decay_shape]
            curves += [(f"{name}, {shape}", train.model_copy(update={"decay_shape": shape})) for shape in others]
    panels = [_panel(title, train, number % 2, number // 2) for number, (title, train) in enumerate(curves)]
    width, rows = 2 * (WIDTH + MARGIN) + MARGIN, -(-len(curves) // 2)
    height = rows * (HEIGHT + 2 * MARGIN)
    style = "text { font: 18px sans-serif; fill: #888 } path { fill: none }"
    view = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    title = f"<title>Learning rate over the steps of a run: {', '.join(SCHEDULES)}</title>"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', title, f"<style>{style}</style>", *panels, "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(title: str, train: TrainConfig, column: int, row: int) -> str:
    rates = [learning_rate_at(train, step, steps=STEPS) for step in range(STEPS)]
    points = " ".join(f"{WIDTH * step / (STEPS - 1):.1f},{HEIGHT * (1 - rate):.1f}" for step, rate in enumerate(rates))
    left, top = MARGIN + column * (WIDTH + MARGIN), MARGIN + row * (HEIGHT + 2 * MARGIN)
    return "\n".join(
        [
            f'<g transform="translate({left} {top})">',
            f'<path d="M0 0 V{HEIGHT} H{WIDTH}" stroke="#888" />',
            f'<path d="M{points}" stroke="#3b82f6" stroke-width="3" />',
            f'<text x="{WIDTH / 2}" y="-14" text-anchor="middle" font-weight="bold">{title}</text>',
            '<text x="-8" y="6" text-anchor="end">high</text>',
            f'<text x="-8" y="{0.9 * HEIGHT + 4:.0f}" text-anchor="end">min</text>',
            f'<text x="{WIDTH}" y="{HEIGHT + 22}" text-anchor="end">last step</text>',
            "</g>",
        ]
    )
