"""What a request demands, derived once when it arrives: the scheduler, the core, the group and the samplers read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.sampling_params import OutputKind, SamplingParams, SamplingStrategy

# No filter; top-k, top-p or min-p; more rules that bend or cut; what kernels have no room for.
SamplerKind = Literal["plain", "filtered", "shaped", "full"]
# What a sampler of kernels has room for; "full" is what exceeds it.
MOST_REPORTED = 20  # likeliest tokens of a row
LONGEST_BAD_WORD = 17  # tokens
MOST_BAD_WORDS = 256  # every word in two spellings
MOST_CHARGED = 8_192  # tokens that may follow what a text ends with: at most as many as it has
MOST_WAVES = 16  # siblings of a diverse set
MOST_ENTRIES = 1_536  # tokens that bias and bans name: as many as callers may name, and 128 ends of the model's own
MOST_ENDS = 8  # tokens that end a beam
MOST_ENDS_OF_SETS = 4  # tokens that end a sibling of a diverse set
LARGEST = 1e30  # what callers may ask for beyond it, or beyond its inverse, would be infinite or 0 in float32


class SamplerChoice(NamedTuple):
    """What a sampler must be able to do for a draw, or for all draws of a step."""

    kind: SamplerKind
    reports: bool = False  # logprobs of several tokens beside the drawn one
    controls: bool = False  # penalties, bias and bans
    candidates: bool = False  # the likeliest tokens after controls and filters, for searches
    distinct: bool = False  # the same ranked with noise: draws without replacement
    charges: bool = False  # what repeats the text
    remembers: bool = False  # codes and limits that a draw leaves for the next
    chooses: bool = False  # which candidates go on, in searches whose steps the host need not wait for
    waves: int = 1  # how often rows are drawn before the last sibling of a diverse set has seen all before it


@dataclass(frozen=True, eq=False)
class Demands:
    """A request's parameters, and what they come to for its prompts and its model. Each request has one of its own.

    What needs only the parameters is derived from them here; the other fields are what the engine knows besides.
    """

    params: SamplingParams
    number: int = 0  # of all requests of the engine, this one's: names it when its id is used again
    seed: int = 0
    prompts: tuple[Sequence[int], ...] = ((),)  # of each track
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()  # as token ids
    breakers: frozenset[int] = frozenset()  # tokens that no repetition goes on past
    longest_output: int = 0

    # -- how many sequences, and how they depend on each other -----------------------------------------------

    @cached_property
    def strategy(self) -> SamplingStrategy:
        return self.params.resolved_strategy

    @cached_property
    def is_beam_search(self) -> bool:
        return self.strategy is SamplingStrategy.BEAM_SEARCH

    @cached_property
    def is_distinct(self) -> bool:
        """Whether its samples are drawn without replacement."""
        return self.strategy is SamplingStrategy.WITHOUT_REPLACEMENT

    @cached_property
    def is_search(self) -> bool:
        """Whether candidates are reported, of which the host chooses, and no token is drawn."""
        return self.is_beam_search or self.is_distinct

    @cached_property
    def num_first_draws(self) -> int:
        """Children that draw from the prompt's last position; searches grow out of one."""
        return 1 if self.is_search else self.params.num_samples

    @cached_property
    def num_candidates(self) -> int:
        """Searches: how many of the best tokens to report instead of drawing one."""
        if self.is_distinct:
            return self.params.n + 1  # the best that is not taken is the threshold
        if not self.is_beam_search:
            return 0
        return num_candidates(self.params.resolved_beam_width, len(self.end_token_ids))

    @cached_property
    def diversity_penalty(self) -> float:
        """What a token loses per earlier sibling that took it in this step; beams do that sum on the host."""
        return min(self.params.diversity_penalty, LARGEST) if self.strategy is SamplingStrategy.DIVERSE else 0.0

    @cached_property
    def num_waves(self) -> int:
        """How many draws of a step come one after the other: siblings that look at each other's tokens."""
        return self.params.num_samples if self.diversity_penalty else 1

    # -- ends ------------------------------------------------------------------------------------------------

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Those of the end tokens that the caller named."""
        return frozenset(self.params.stop_token_ids or ())

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        return self.stop_token_ids | (frozenset() if self.params.ignore_eos else self.eos_token_ids)

    # -- driving ---------------------------------------------------------------------------------------------

    @cached_property
    def steps_together(self) -> bool:
        """Whether its sequences look at each other's tokens in every step."""
        return self.params.num_together is not None

    @cached_property
    def may_run_ahead(self) -> bool:
        """Whether the step after a draw can be launched before the host knows the token."""
        return not self.steps_together and not self.looks_back

    @cached_property
    def may_run_ahead_by_kernels(self) -> bool:
        """The same where the device keeps what was drawn, and its kernels look back at that.

        What a grammar allows is told by the host before the draw, while the device computes what is drawn from.
        """
        waits = self.steps_together or self.remembers or self.looks_far_back
        return self.may_run_ahead or (not waits and self.sampler != "full")

    @cached_property
    def is_chosen_by_kernels(self) -> bool:
        """Whether kernels can choose its beams' continuations, so that its steps need not wait for the host."""
        is_plain = self.is_beam_search and self.params.num_beam_groups == 1 and self.sampler != "full"
        return is_plain and not self.is_controlled and not self.looks_back and len(self.end_token_ids) <= MOST_ENDS

    @cached_property
    def is_set_by_kernels(self) -> bool:
        """Whether kernels can draw a diverse set one step on without the host: they know which tokens end a sibling,
        whom the others then do not look at any more, and nothing else does."""
        if self.strategy is not SamplingStrategy.DIVERSE or self.sampler == "full" or self.remembers:
            return False
        is_told = self.looks_far_back or self.params.structured_outputs is not None or self.params.stop_strings
        return not is_told and len(self.end_token_ids) <= MOST_ENDS_OF_SETS

    @cached_property
    def may_speculate(self) -> bool:
        """Whether its tokens may be drafted: each is drawn for itself, from its seed and the tokens before it."""
        params = self.params
        looks_aside = params.num_together is not None or self.remembers or bool(params.logits_processors)
        return params.speculate and not looks_aside

    @cached_property
    def is_streamed(self) -> bool:
        return self.params.output_kind is not OutputKind.FINAL_ONLY

    @cached_property
    def is_quiet(self) -> bool:
        """Whether nobody sees an output before it has ended, and no text ends it: its tokens become text then."""
        return not self.is_streamed and not self.params.stop_strings

    @cached_property
    def is_watched(self) -> bool:
        return self.params.output_kind is OutputKind.GROWTH

    @cached_property
    def children_go_alone(self) -> bool:
        """Whether children, once they are there, can be recorded one by one: no output is due for several together."""
        return not self.is_search and (self.params.num_samples == 1 or not self.is_streamed)

    # -- sampling --------------------------------------------------------------------------------------------

    @cached_property
    def temperature(self) -> float:
        """0: the likeliest token, and any other stays above 0 in float32. Beams are not scaled."""
        given = 1.0 if self.is_beam_search else self.params.temperature
        return given and min(max(given, 1 / LARGEST), LARGEST)

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def is_random(self) -> bool:
        return not self.is_greedy and not self.is_search

    @cached_property
    def narrows(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out; there is nothing to leave out before the likeliest."""
        params = self.params
        return not self.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    @cached_property
    def counts_output(self) -> bool:
        return bool(self.params.presence_penalty or self.params.frequency_penalty)

    @cached_property
    def counts_prompt(self) -> bool:
        return self.params.repetition_penalty != 1

    @cached_property
    def looks_back(self) -> bool:
        """Whether what may be drawn depends on which tokens were drawn before."""
        params = self.params
        return bool(
            self.counts_output
            or self.counts_prompt
            or params.bad_words
            or params.logits_processors
            or self.looks_far_back
            or params.structured_outputs
            or self.remembers
        )

    @cached_property
    def looks_far_back(self) -> bool:
        """Whether the order of all tokens before matters, and not only the last few, and how many there are of each."""
        return bool(self.params.no_repeat_ngram_size or self.params.dry_multiplier)

    @cached_property
    def is_arithmetic(self) -> bool:
        return self.strategy is SamplingStrategy.ARITHMETIC and not self.is_greedy

    @cached_property
    def remembers(self) -> bool:
        """Whether a draw depends on what the ones before it left behind, beside their tokens."""
        return not self.is_greedy and bool(self.is_arithmetic or self.params.mirostat_tau)

    @cached_property
    def is_shaped(self) -> bool:
        """Whether rules beyond top-k, top-p, min-p and the penalties change what it is drawn from."""
        params = self.params
        if self.remembers:
            return True
        cuts = params.top_n_sigma or params.epsilon_cutoff or params.eta_cutoff or params.top_a or params.p_less
        bends = params.dynatemp_range or params.smoothing_factor or params.xtc_probability
        return not self.is_greedy and bool(cuts or bends or params.typical_p < 1)

    @cached_property
    def is_controlled(self) -> bool:
        """Whether penalties, bias or bans change its logits."""
        params = self.params
        named = params.logit_bias or params.allowed_token_ids or params.min_tokens or self.bad_words
        static = named or params.structured_outputs
        return bool(static or self.counts_output or self.counts_prompt or self.looks_far_back)

    @cached_property
    def sampler(self) -> SamplerKind:
        """The cheapest sampler that serves a row of this request; its controls are told apart by `is_controlled`."""
        params = self.params
        reported = max(params.logprobs or 0, self.num_candidates)
        if params.logits_processors or self.num_waves > MOST_WAVES or reported > MOST_REPORTED:
            return "full"
        remembers_both = self.is_arithmetic and params.mirostat_tau > 0
        ranks_greedily = self.is_distinct and self.is_greedy
        if ranks_greedily or remembers_both or params.return_kept is not None:
            return "full"
        if self.looks_far_back and max(map(len, self.prompts)) + self.longest_output > MOST_CHARGED:
            return "full"
        words = self.bad_words
        if len(words) > MOST_BAD_WORDS or any(len(word) > LONGEST_BAD_WORD for word in words):
            return "full"
        if len(params.logit_bias or ()) + len(self.end_token_ids) + len(words) > MOST_ENTRIES:
            return "full"
        if self.is_shaped:
            return "shaped"
        return "filtered" if self.narrows else "plain"

    @cached_property
    def choice(self) -> SamplerChoice:
        """What a sampler of kernels must be able to do for it."""
        reports = self.params.logprobs is not None
        waves = 1
        while waves < self.num_waves:  # graphs are few
            waves *= 2
        return SamplerChoice(
            self.sampler,
            reports,
            self.is_controlled,
            self.is_search,
            self.is_distinct,
            self.looks_far_back,
            self.remembers,
            self.is_chosen_by_kernels,
            waves,
        )

    @cached_property
    def largest_token_id(self) -> int:
        """Of all that prompts and controls name."""
        params = self.params
        words = [token_id for word in self.bad_words for token_id in word]
        named = (*self.prompts, params.logit_bias or (), params.allowed_token_ids or (), self.end_token_ids, words)
        return max(max(token_ids, default=0) for token_ids in named)

    @cached_property
    def distinct_prompts(self) -> tuple[NDArray[np.int64], ...]:
        return tuple(np.unique(np.asarray(prompt, dtype=np.int64)) for prompt in self.prompts)


def num_candidates(beam_width: int, num_end_tokens: int) -> int:
    """How many of the likeliest tokens of each beam are enough to decide a step exactly.

    A beam group of width w looks at its w best continuations and at its w best that do not end: both are among each
    beam's first w + num_end_tokens. Earlier beam groups push down at most as many tokens as they have beams. Together
    the beam groups have beam_width beams.
    """
    return beam_width + num_end_tokens
