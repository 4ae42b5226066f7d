"""Ramify: an LLM inference engine for sampling.

    from ramify import LLM, SamplingParams
    LLM().generate("Once upon a time", SamplingParams(n=4, temperature=0.8, seed=7, max_tokens=64))

Names are loaded when first used: `import ramify` and everything on the host side need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ramify.process.garbage import collector_paused
from ramify.version import __version__

if TYPE_CHECKING:
    from ramify.async_llm import AsyncLLM
    from ramify.config import CacheConfig, EngineConfig, MixtureConfig, ModelConfig, SchedulerConfig
    from ramify.documents.managers import ParallelSamplingManager, ParentRequest
    from ramify.documents.manual import BeamSearchManager, BeamState, DiverseSamplingManager
    from ramify.documents.model_runner import ModelRunner
    from ramify.documents.sampler import Sampler
    from ramify.drive.async_engine import AsyncEngine
    from ramify.drive.intake import TextPrompt, TokensPrompt
    from ramify.drive.node import Node
    from ramify.drive.tree import Tree
    from ramify.engine.core import EngineCore
    from ramify.engine.metrics import IterationStats
    from ramify.engine.request import Request
    from ramify.engine.search.ranking import BestOfNFilter
    from ramify.engine.sequence import Sequence, SequenceData, SequenceStatus
    from ramify.errors import (
        CacheExhaustedError,
        ChatTemplateError,
        EngineAsleepError,
        EngineBusyError,
        EngineClosedError,
        EngineFaultError,
        EngineLostError,
        FileFormatError,
        IllegalMoveError,
        InvalidInputError,
        ModelError,
        ModelNotFoundError,
        RamifyError,
        UnsupportedAttributeError,
        UnsupportedError,
        UnsupportedModelError,
        WeightsError,
    )
    from ramify.llm import LLM
    from ramify.models.loader import ModelLoader, get_model_and_tokenizer
    from ramify.optimal import OptimalOutputs, OptimalSampling, OptimalSamplingV1
    from ramify.outputs import (
        CompletionOutput,
        ContinuationLogprobs,
        FinishReason,
        GrownToken,
        GrowthStep,
        Inclusion,
        Kept,
        Logprob,
        MixtureReport,
        PairLogprobs,
        RequestMetrics,
        RequestOutput,
        Standing,
    )
    from ramify.sampling_params import OutputKind, SamplingParams, SamplingStrategy, SamplingType

_HOMES = {
    "ramify.drive.async_engine": ("AsyncEngine",),
    "ramify.drive.intake": ("TextPrompt", "TokensPrompt"),
    "ramify.drive.mailroom": ("RequestStream",),
    "ramify.async_llm": ("AsyncLLM",),
    "ramify.config": ("CacheConfig", "EngineConfig", "MixtureConfig", "ModelConfig", "SchedulerConfig"),
    "ramify.engine.core": ("EngineCore",),
    "ramify.errors": (
        "CacheExhaustedError",
        "ChatTemplateError",
        "EngineAsleepError",
        "EngineBusyError",
        "EngineClosedError",
        "EngineFaultError",
        "EngineLostError",
        "FileFormatError",
        "IllegalMoveError",
        "InvalidInputError",
        "ModelError",
        "ModelNotFoundError",
        "RamifyError",
        "UnsupportedAttributeError",
        "UnsupportedError",
        "UnsupportedModelError",
        "WeightsError",
    ),
    "ramify.llm": ("LLM",),
    "ramify.engine.metrics": ("IterationStats",),
    "ramify.models.loader": ("ModelLoader", "get_model_and_tokenizer"),
    "ramify.optimal": ("OptimalOutputs", "OptimalSampling", "OptimalSamplingV1"),
    "ramify.outputs": (
        "CompletionOutput",
        "ContinuationLogprobs",
        "FinishReason",
        "GrownToken",
        "GrowthStep",
        "Inclusion",
        "Kept",
        "Logprob",
        "MixtureReport",
        "PairLogprobs",
        "RequestMetrics",
        "RequestOutput",
        "Standing",
    ),
    "ramify.engine.request": ("Request",),
    "ramify.sampling_params": ("OutputKind", "SamplingParams", "SamplingStrategy", "SamplingType"),
    "ramify.documents.managers": ("ParallelSamplingManager", "ParentRequest"),
    "ramify.documents.manual": ("BeamSearchManager", "BeamState", "DiverseSamplingManager"),
    "ramify.documents.model_runner": ("ModelRunner",),
    "ramify.documents.sampler": ("Sampler",),
    "ramify.engine.search.ranking": ("BestOfNFilter",),
    "ramify.engine.sequence": ("Sequence", "SequenceData", "SequenceStatus"),
    "ramify.drive.node": ("Node",),
    "ramify.drive.tree": ("Tree",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncLLM",
    "BeamSearchManager",
    "BeamState",
    "BestOfNFilter",
    "CacheConfig",
    "CacheExhaustedError",
    "ChatTemplateError",
    "CompletionOutput",
    "ContinuationLogprobs",
    "DiverseSamplingManager",
    "EngineAsleepError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineCore",
    "EngineFaultError",
    "EngineLostError",
    "FileFormatError",
    "FinishReason",
    "GrownToken",
    "GrowthStep",
    "IllegalMoveError",
    "Inclusion",
    "InvalidInputError",
    "IterationStats",
    "Kept",
    "Logprob",
    "MixtureConfig",
    "MixtureReport",
    "ModelConfig",
    "ModelError",
    "ModelLoader",
    "ModelNotFoundError",
    "ModelRunner",
    "Node",
    "OptimalOutputs",
    "OptimalSampling",
    "OptimalSamplingV1",
    "OutputKind",
    "PairLogprobs",
    "ParallelSamplingManager",
    "ParentRequest",
    "RamifyError",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestStream",
    "Sampler",
    "SamplingParams",
    "SamplingStrategy",
    "SamplingType",
    "SchedulerConfig",
    "Sequence",
    "SequenceData",
    "SequenceStatus",
    "Standing",
    "TextPrompt",
    "TokensPrompt",
    "Tree",
    "UnsupportedAttributeError",
    "UnsupportedError",
    "UnsupportedModelError",
    "WeightsError",
    "__version__",
    "get_model_and_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ramify' has no attribute {name!r}")
    with collector_paused():
        return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
