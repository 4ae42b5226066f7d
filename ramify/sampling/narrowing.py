"""What becomes of logits after the controls, in its order: bent, then cut down to what may be drawn.

    top-n-sigma, temperature (or a dynamic one), smoothing; then top-k, top-p, min-p, typical, epsilon, eta, top-a,
    p-less, mirostat and xtc, each on what the ones before it left

Each acts on the rows that ask for it, and returns its argument where none does.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ramify.engine.plan import Draw
from ramify.sampling import filters, processors, shaping, truncation
from ramify.sampling.draw import COIN_LEVEL, coin
from ramify.sampling.piece import Rows
from ramify.sampling.settings import rows_among

Filter = Callable[[Tensor, Rows], Tensor]


def scale(logits: Tensor, rows: Rows) -> Tensor:
    temperatures = rows.settings.temperatures
    if temperatures is None:
        return logits
    dynamic = rows.settings.chosen.get("dynatemp_range")
    if dynamic is not None:
        own = shaping.dynamic_temperature(
            _taken(logits, dynamic.rows), _taken(temperatures, dynamic.rows), *dynamic.columns
        )
        temperatures = own if dynamic.rows is None else temperatures.index_copy(0, dynamic.rows, own)
    return processors.temperature(logits, temperatures)


def keep_likely(logits: Tensor, rows: Rows) -> Tensor:
    """top-k, top-p and min-p, on the rows that ask for one of them."""
    chosen = rows.settings.filters
    if chosen is None:
        return logits
    ranked = rows.operators.ranked_floors
    return _act(logits, rows.settings.filtered_rows, lambda own: filters.apply(own, chosen, ranked))


def keep_typical(logits: Tensor, rows: Rows) -> Tensor:
    chosen = rows.settings.chosen.get("typical_p")
    if chosen is None:
        return logits
    [share] = chosen.columns
    return _act(logits, chosen.rows, lambda own: truncation.typical_p(own, share, rows.operators.crossing))


def limit_surprise(logits: Tensor, rows: Rows) -> Tensor:
    """Mirostat, at the limit that its row has come to."""
    if not rows.settings.follows_surprise:
        return logits
    following = [
        row for row, draw in enumerate(rows.draws) if draw.demands.params.mirostat_tau and draw.demands.is_random
    ]
    index = rows_among(following, len(rows.draws), logits.device)
    limits = logits.new_tensor([rows.limits[row] for row in following])
    return _act(logits, index, lambda own: truncation.mirostat(own, limits))


def exclude_likeliest(logits: Tensor, rows: Rows) -> Tensor:
    """XTC, on the rows whose coin falls for it in this step."""
    if not rows.settings.excludes:
        return logits
    excluding = [
        row
        for row, draw in enumerate(rows.draws)
        if draw.demands.params.xtc_probability
        and not draw.demands.is_greedy
        and _coin(draw) < draw.demands.params.xtc_probability
    ]
    if not excluding:
        return logits
    index = rows_among(excluding, len(rows.draws), logits.device)
    thresholds = logits.new_tensor([rows.draws[row].demands.params.xtc_threshold for row in excluding])
    return _act(logits, index, lambda own: truncation.xtc(own, thresholds))


def _rule(name: str, act: Callable[..., Tensor]) -> Filter:
    """A rule on the rows that ask for it."""

    def apply(logits: Tensor, rows: Rows) -> Tensor:
        chosen = rows.settings.chosen.get(name)
        if chosen is None:
            return logits
        return _act(logits, chosen.rows, lambda own: act(own, *chosen.columns))

    return apply


def _act(logits: Tensor, rows: Tensor | None, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits with what `act` makes of these rows; None stands for all."""
    changed = act(_taken(logits, rows))
    return changed if rows is None else logits.index_copy(0, rows, changed)


def _taken(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


keep_within_deviations = _rule("top_n_sigma", truncation.top_n_sigma)
smooth = _rule("smoothing_factor", shaping.smooth)
TRUNCATIONS: tuple[Filter, ...] = (
    keep_likely,
    keep_typical,
    _rule("epsilon_cutoff", truncation.epsilon_cutoff),
    _rule("eta_cutoff", truncation.eta_cutoff),
    _rule("top_a", truncation.top_a),
    _rule("p_less", lambda logits, _: truncation.p_less(logits)),
    limit_surprise,
    exclude_likeliest,
)
BENDS: tuple[Filter, ...] = (scale, smooth)
BENDS_OF_MIXTURES: tuple[Filter, ...] = (smooth,)
FILTERS: tuple[Filter, ...] = (keep_within_deviations, scale, smooth, *TRUNCATIONS)
# The temperature is in the mixture already.
FILTERS_OF_MIXTURES: tuple[Filter, ...] = (keep_within_deviations, smooth, *TRUNCATIONS)


def _coin(draw: Draw) -> float:
    demands = draw.demands
    return coin(demands.seed, demands.params.child + draw.child, draw.position, COIN_LEVEL)
