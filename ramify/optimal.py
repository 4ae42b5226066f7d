"""OptimalSampling: a teacher and a student, every token drawn from the optimal mixture of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Unpack

from ramify.config import AlphaMethod, EngineOptions, MixtureConfig, configs_of_pair
from ramify.device_names import Devices
from ramify.distill.recipe import MIXTURE_NAMES, Recipe, load_preset
from ramify.drive import alpha_view
from ramify.drive.build import Engine, build_pair
from ramify.drive.intake import Prompt, as_prompts
from ramify.drive.loops import Calls
from ramify.drive.pair_intake import PairIntake, Rendered
from ramify.drive.scoring import comparison_requests, pair_scores, paired_up
from ramify.engine.core import EngineCore
from ramify.engine.request import Request
from ramify.errors import InvalidInputError, UnsupportedError
from ramify.notebook import cards
from ramify.notebook.token_shades import reach_of
from ramify.outputs import CompletionOutput, MixtureReport, PairLogprobs, RequestOutput
from ramify.replicas.doors import pair_for_calls
from ramify.sampling_params import OutputKind, SamplingParams
from ramify.text.detokenizer import token_texts
from ramify.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ramify.replicas.replica_core import ReplicaCore  # brings msgspec

DIAGNOSTICS = tuple(name for name in MixtureReport._fields if name not in {"alpha", "is_clamped"})
# What a caller may say beside a preset, which says the rest.
RECIPE_OPTIONS = (*MIXTURE_NAMES, "teacher_system_prompt", "theta_system_prompt", "enable_chat_template")


class PairOptions(EngineOptions, total=False):
    """The options of `OptimalSampling`: how the models are mixed and asked, and the engine's."""

    alpha_method: AlphaMethod  # default "kl_symmetry"
    alpha: float | None  # None
    kl_budget: float | None  # None
    alpha_min: float  # 0.0
    alpha_max: float  # 1.0
    teacher_top_k: int  # -1
    teacher_top_p: float  # 1.0
    force_teacher_first_token: bool  # False
    force_teacher_special_tokens: bool  # False
    teacher_system_prompt: str | None  # None
    theta_system_prompt: str | None  # None
    enable_chat_template: bool  # False
    devices: Devices | None  # None: both on one; else (teacher's, student's), several sharing a model


@dataclass(frozen=True)
class OptimalOutputs:
    """The samples as flat lists, prompt by prompt.

    `alpha_history[i]` and `diagnostics[name][i]` have one number per token of sample i. `outputs` holds the same
    samples as one RequestOutput per prompt.
    """

    outputs: list[RequestOutput]
    tokenizer: Tokenizer | None

    @cached_property
    def samples(self) -> list[CompletionOutput]:
        return [sample for output in self.outputs for sample in output.outputs]

    @property
    def generated_texts(self) -> list[str]:
        return [sample.text for sample in self.samples]

    @property
    def generated_ids(self) -> list[list[int]]:
        return [list(sample.token_ids) for sample in self.samples]

    @property
    def num_tokens(self) -> list[int]:
        return [len(sample.token_ids) for sample in self.samples]

    @cached_property
    def alpha_history(self) -> list[list[float]]:
        """The teacher's weight at each token."""
        return [[report.alpha for report in sample.mixture or ()] for sample in self.samples]

    @cached_property
    def diagnostics(self) -> dict[str, list[list[float]]]:
        """The other numbers of MixtureReport, by name."""
        return {
            name: [[getattr(report, name) for report in sample.mixture or ()] for sample in self.samples]
            for name in DIAGNOSTICS
        }

    @property
    def alpha_stats(self) -> dict[str, float]:
        """Over all tokens of all samples; `clamped` is the share of tokens with alpha at a bound."""
        reports = [report for sample in self.samples for report in sample.mixture or ()]
        if not reports:
            return {"count": 0.0}
        values = [report.alpha for report in reports]
        return {
            "count": float(len(values)),
            "mean": fmean(values),
            "std": pstdev(values),
            "min": min(values),
            "max": max(values),
            "clamped": fmean(report.is_clamped for report in reports),
        }

    def save_alpha_history(self, path: str | Path) -> None:
        """One JSON object per sample: its text, its tokens, alpha and every diagnostic per token."""
        alpha_view.write_history(Path(path), self.outputs)

    def plot(self, path: str | Path, *, sample: int = 0) -> None:
        """Draws one sample: its text coloured by alpha and curves (.html), or the curves alone (.png, .svg, .pdf).

        The curves are alpha and both KL divergences over the tokens. Pictures need matplotlib.
        """
        if not 0 <= sample < len(self.samples):
            raise InvalidInputError(f"sample must be in 0..{len(self.samples) - 1}, got {sample}")
        chosen = self.samples[sample]
        alpha_view.write_plot(Path(path), token_texts(chosen.token_ids, self.tokenizer), chosen.mixture or ())

    def _repr_html_(self) -> str:
        """What a notebook shows: texts shaded by alpha, and alpha over the tokens."""
        reach = reach_of(self.samples)
        return cards.html_of_requests(
            self.outputs,
            pieces_of=lambda sample: token_texts(sample.token_ids, self.tokenizer),
            below=lambda sample: alpha_view.small_curve([report.alpha for report in sample.mixture or ()], reach),
        )


class OptimalSampling:
    """Two models, one distribution: q* = theta^(1 - alpha) teacher^alpha / Z at every token.

    Each model sees its own prompt (with its own system prompt and chat template), then both see the same tokens. Two
    names for the same files are loaded once. The options are those of `LLM`, for both models together, and those of the
    mixture (`PairOptions`).

    `devices=(("cuda:0", "cuda:1"), ("cuda:2",))` gives each model its own device: the teacher's and the student's, of
    which several share a model (`tensor_parallel_size`). Draws are the same wherever the models are.

    `preset` names the settings of a recipe for `ramify distill` (or is a YAML file's path, or a Recipe): its models,
    mixture, system prompts and chat template hold where no argument says otherwise, its samples' settings (n,
    max_tokens, temperature and so on) are then `generate`'s defaults.
    """

    def __init__(
        self,
        model_teacher: str | None = None,
        model_theta: str | None = None,
        *,
        preset: str | Path | Recipe | None = None,
        say: Callable[[str], None] = lambda _: None,
        **options: Unpack[PairOptions],
    ) -> None:
        self.recipe = _recipe(preset, model_teacher, model_theta, options)
        self.mixture_config = MixtureConfig(**self.recipe.mixture_options())
        engine_options: Any = {name: value for name, value in options.items() if name not in RECIPE_OPTIONS}
        devices = engine_options.pop("devices", None)
        if engine_options.get("generation_config", "none") != "none":
            raise InvalidInputError(
                "generation_config must be 'none' for two models: what one recommends says nothing of their mixture"
            )
        self.config, theta = configs_of_pair(
            self.recipe.model_teacher, self.recipe.model_theta, devices, engine_options
        )
        asked: Any = {
            "system_prompts": (self.recipe.teacher_system_prompt, self.recipe.theta_system_prompt),
            "enable_chat_template": self.recipe.enable_chat_template,
            "say": say,
        }
        self._engine: Engine[PairIntake] | None = None  # where it is in this process
        self._core: EngineCore | ReplicaCore
        if self.config.model_config.data_parallel_size > 1:
            self._replicas = pair_for_calls(self.config, theta, self.mixture_config, **asked)
            assert isinstance(self._replicas.intake, PairIntake), "as two models have"
            self._core, self._intake = self._replicas.core, self._replicas.intake
        else:
            self._engine = build_pair(self.config, theta, self.mixture_config, are_apart=devices is not None, **asked)
            self._core, self._intake = self._engine.core, self._engine.intake
        self.tokenizer = self._intake.codec.tokenizer
        self.max_model_len = self._core.capacity.max_model_len
        self.loads_one_checkpoint = len(self._core.capacity.num_blocks) == 1
        self._calls = Calls(self._core)

    @property
    def core(self) -> EngineCore:
        """The engine, where it is in this process."""
        return self._here("OptimalSampling.core").core

    def _here(self, what: str) -> Engine[PairIntake]:
        if self._engine is None:
            raise UnsupportedError(
                f"{what} needs the engine in this process, and with data_parallel_size "
                f"{self.config.model_config.data_parallel_size} engines are in processes of their own"
            )
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        theta_prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        use_tqdm: bool = True,
        **fields_of_sampling_params: Any,
    ) -> OptimalOutputs:
        """n samples of every prompt; `theta_prompts` are the student's prompts (default: the same).

        The options are fields of SamplingParams, by default n=1, max_tokens=512, temperature=0.8 or what the preset
        says. A bad prompt or option raises before anything starts.
        """
        params = SamplingParams(**(self.recipe.sampling_options() | fields_of_sampling_params))
        if params.output_kind is not OutputKind.FINAL_ONLY:
            raise InvalidInputError("output_kind must be 'final_only': generate returns when all is done")
        requests = [
            self._intake.request(prompt, params, theta_prompt=theta_prompt)
            for prompt, theta_prompt in zip(*_paired(prompts, theta_prompts), strict=True)
        ]
        return OptimalOutputs(self._calls.run(requests, use_tqdm=use_tqdm), self.tokenizer)

    def logprobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        theta_prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        top_k: int = 0,
    ) -> list[PairLogprobs]:
        """What both models say of given tokens (at temperature 1), and their full-vocabulary KL at each of them.

        One continuation after each prompt, or many after one. A continuation is token ids, or text, which is tokenised
        by itself. All are computed in batches, and what prompts begin with in common is computed once.
        """
        before, given = paired_up(self._intake, prompts, continuations)
        own = before if theta_prompts is None else paired_up(self._intake, theta_prompts, given)[0]
        pieces = comparison_requests(
            self._intake,
            [self._intake.render(*pair) for pair in zip(before, own, strict=True)],
            given,
            top_k,
            most_at_once=max(1, self._core.capacity.max_num_batched_tokens // 2),
        )
        outputs = self._calls.run([request for each in pieces for request in each], use_tqdm=False)
        return pair_scores(outputs, [len(each) for each in pieces])

    def request(self, prompt: Prompt, theta_prompt: Prompt | None, params: SamplingParams) -> Request:
        """A request for `finish`; a bad prompt or parameter raises here."""
        return self._intake.request(prompt, params, theta_prompt=theta_prompt)

    def finish(
        self, requests: Iterable[Request], *, most_at_once: int, after_step: Callable[[], None] = lambda: None
    ) -> Iterator[RequestOutput]:
        """Finished outputs, in whatever order; at most `most_at_once` of any number of requests run at a time.

        `after_step` is called after each of the engine's steps. Other calls wait until this is read to its end or
        closed.
        """
        return self._calls.finish(requests, most_at_once=most_at_once, after_step=after_step)

    def render(
        self, prompts: Prompt | Sequence[Prompt], theta_prompts: Prompt | Sequence[Prompt] | None = None
    ) -> list[tuple[Rendered, Rendered]]:
        """What the models will see for each prompt, as (teacher's, student's)."""
        return [self._intake.render(*pair) for pair in zip(*_paired(prompts, theta_prompts), strict=True)]

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters since the start: the engine's, and each model's.

        If both models are one checkpoint, they share one cache, whose blocks are then reported for both.
        """
        teacher, theta = self._core.model_stats()
        return {"engine": self._core.stats(), "teacher": teacher, "theta": theta}

    def replica_stats(self) -> list[dict[str, int]]:
        """The engine's counters, of each replica."""
        return [self._core.stats()] if isinstance(self._core, EngineCore) else self._core.replica_stats()

    @property
    def generated_tokens(self) -> int:
        """Drawn since the start."""
        return self._core.generated_tokens

    def reset_prefix_cache(self) -> None:
        """Empties the prefix caches of both models."""
        self._calls.between(self._core.reset_prefix_cache)


OptimalSamplingV1 = OptimalSampling  # the name by which its source document knows it


def _recipe(preset: object, model_teacher: object, model_theta: object, options: Mapping[str, Any]) -> Recipe:
    """The preset's settings (default: a recipe's own), changed by what the caller says."""
    models = {"model_teacher": model_teacher, "model_theta": model_theta}
    said = {name: model for name, model in models.items() if model is not None}
    if preset is None and len(said) < len(models):
        raise InvalidInputError("model_teacher and model_theta must be given, or a preset that names them")
    recipe = preset if isinstance(preset, Recipe) else Recipe() if preset is None else load_preset(preset)
    return recipe.changed(said | {name: options[name] for name in RECIPE_OPTIONS if name in options})


def _paired(prompts: Any, theta_prompts: Any) -> tuple[list[Prompt], list[Prompt]]:
    teacher = as_prompts(prompts)
    theta = teacher if theta_prompts is None else as_prompts(theta_prompts, "theta_prompts")
    if len(teacher) != len(theta):
        raise InvalidInputError(f"theta_prompts must be one per prompt: got {len(theta)} for {len(teacher)} prompts")
    return teacher, theta
