"""How well an acceptance head is calibrated: its predictions against the acceptance that follows (SpecDec++)."""

from __future__ import annotations

from collections.abc import Sequence

from . import style
from .style import GREY, PALETTE, Plot

_COLOUR = next(iter(PALETTE))


def calibration(bins: Sequence[tuple[int, float, float]], rejection_weight: float) -> Plot:
    """`bins` are numbers of tokens, mean prediction and mean acceptance; `rejection_weight` is that of training."""
    with style.styled():
        figure, (top, bottom) = style.canvas(4.2, 2, 1, sharex=True, height_ratios=[3, 1])
        acceptances = [place / 100 for place in range(101)]
        expected = [each / (each + rejection_weight * (1 - each)) for each in acceptances]
        top.plot([0, 1], [0, 1], color=GREY, linewidth=1.0, linestyle=":", label="the probability itself")
        if rejection_weight != 1:
            weighed = f"rejections weigh {rejection_weight:g} times"
            top.plot(expected, acceptances, color=GREY, linewidth=1.2, label=weighed)
        tokens, predicted, accepted = ([each[place] for each in bins] for place in range(3))
        top.plot(predicted, accepted, color=_COLOUR, marker="o", label="the head, on texts held out")
        bottom.bar(predicted, tokens, width=0.06, color=_COLOUR)
        top.set_ylabel("accepted")
        bottom.set(xlabel="predicted probability of being accepted", ylabel="tokens")
        top.grid(True)
        style.legend(figure, top.get_legend_handles_labels()[0])
    what = (
        "Drafted tokens by what the head predicts, against how likely the target accepts them. Grey: what a perfect "
        "head gives."
    )
    return Plot("calibration", "Calibration of the acceptance head", what, figure)
