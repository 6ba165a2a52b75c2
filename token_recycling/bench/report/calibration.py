"""How well an acceptance head is calibrated: its predictions against the acceptance that follows (SpecDec++)."""

from __future__ import annotations

from collections.abc import Sequence

from . import style
from .style import GREY, PALETTE, Plot


def calibration(bins: Sequence[tuple[int, float, float]], rejection_weight: float) -> Plot:
    """`bins` are numbers of tokens, mean prediction and mean acceptance; `rejection_weight` is that of training."""
    with style.styled():
        figure, (top, bottom) = style.canvas(4.2, 2, 1, sharex=True, height_ratios=[3, 1])
        acceptances = [place / 100 for place in range(101)]
        expected = [each / (each + rejection_weight * (1 - each)) for each in acceptances]
        top.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="the probability itself")
        if rejection_weight != 1:
            top.plot(expected, acceptances, color=GREY, label=f"rejections weigh {rejection_weight:g} times")
        tokens, predicted, accepted = ([each[place] for each in bins] for place in range(3))
        top.plot(predicted, accepted, color=PALETTE[0], marker="o", label="the head, on texts held out")
        bottom.bar(predicted, tokens, width=0.06, color=PALETTE[0])
        top.set_ylabel("accepted")
        bottom.set(xlabel="predicted probability of being accepted", ylabel="tokens")
        style.legend(figure, top)
    said = "Drafted tokens by what the head predicts, and how likely the target accepts them. Grey: a perfect head."
    return Plot("calibration", "Calibration of the acceptance head", said, figure)
