"""What scripts written for vLLM pass, call and read beside what Ramify has: accepted where it asks for nothing.

Options that only change speed or logs are taken at any value, the others at their neutral ones; whatever would change
results is refused with what to do instead. docs/coming_from_vllm.md says the same to readers, and a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.foreign.keywords import Foreign

_OTHER_SHARES = "tensor_parallel_size shares a model among devices, data_parallel_size makes replicas"
_SAID_BY_FILES = "the checkpoint says how it is quantised (GPTQ, AWQ, FP8, GGUF): leave it out"
_TEXT_ALONE = "models take text or token ids alone"
_NO_LORA = "adapters are not served: merge them into the weights"
_NO_SPECULATION = "see speculation, which drafts tokens that are the same with it and without"
_GENERATES = "models generate text, and nothing else"
_FROM_CONFIG = "the checkpoint's config.json says it: change it there"
_ONE_GRAMMAR = "llguidance follows all grammars: SamplingParams(structured_outputs={...}) asks for one"
_SAFE_FILES = "only safetensors and GGUF files are read, and no code of a checkpoint is run"
_HUB = "fetch that one with huggingface_hub, and give its folder as the model"
_ANY = Foreign(changes_nothing=True)

# Options of vLLM's LLM(...) that Ramify's does not have.
ENGINE_OPTIONS: dict[str, Foreign] = {
    # models and their files
    "task": Foreign(_GENERATES, ("auto", "generate")),
    "runner": Foreign(_GENERATES, ("auto", "generate")),
    "convert": Foreign(_GENERATES, ("auto", "none")),
    "trust_remote_code": Foreign(_SAFE_FILES, (False,)),
    "revision": Foreign(_HUB),
    "code_revision": Foreign(_SAFE_FILES),
    "tokenizer_revision": Foreign(_HUB),
    "download_dir": Foreign("set HF_HOME for hub models, RAMIFY_CACHE for the embedded one"),
    "hf_token": Foreign("set HF_TOKEN, which huggingface_hub reads", (False,)),
    "hf_config_path": Foreign(_FROM_CONFIG),
    "hf_overrides": Foreign(_FROM_CONFIG),
    "config_format": Foreign("config.json is read in Hugging Face's format", ("auto", "hf")),
    "model_loader_extra_config": Foreign(_SAFE_FILES),
    "ignore_patterns": Foreign(_HUB),
    "model_impl": Foreign("there is one decoder for all families", ("auto",)),
    "rope_scaling": Foreign(_FROM_CONFIG),
    "rope_theta": Foreign(_FROM_CONFIG),
    "quantization": Foreign(_SAID_BY_FILES),
    "override_generation_config": Foreign("pass SamplingParams with these values to generate or chat"),
    # tokenizers
    "tokenizer_mode": Foreign("the tokenizer is read as the folder has it", ("auto", "fast", "hf")),
    "skip_tokenizer_init": Foreign("give token ids as prompts and SamplingParams(detokenize=False)", (False,)),
    "tokenizer_pool_size": _ANY,
    "tokenizer_pool_type": _ANY,
    # several devices
    "pipeline_parallel_size": Foreign(_OTHER_SHARES, (1,)),
    "decode_context_parallel_size": Foreign(_OTHER_SHARES, (1,)),
    "prefill_context_parallel_size": Foreign(_OTHER_SHARES, (1,)),
    "enable_expert_parallel": Foreign(_OTHER_SHARES, (False,)),
    "distributed_executor_backend": Foreign(_OTHER_SHARES + "; ramify.ray is for clusters", ("uni", "mp")),
    "worker_cls": Foreign("there are no workers", ("auto",)),
    "worker_extension_cls": Foreign("there are no workers"),
    "disable_custom_all_reduce": _ANY,
    "max_parallel_loading_workers": _ANY,
    "ray_workers_use_nsight": Foreign(_OTHER_SHARES, (False,)),
    # memory and scheduling
    "kv_cache_dtype": Foreign("keys and values are kept in the model's dtype", ("auto",)),
    "calculate_kv_scales": Foreign("keys and values are kept in the model's dtype", (False,)),
    "num_gpu_blocks_override": Foreign("use num_kv_blocks"),
    "kv_cache_memory_bytes": Foreign("use num_kv_blocks or gpu_memory_utilization"),
    "cpu_offload_gb": Foreign("weights stay on their device", (0, 0.0)),
    "enable_sleep_mode": _ANY,  # every engine can sleep
    "disable_sliding_window": Foreign("models with sliding windows are not served", (False,)),
    "scheduling_policy": Foreign("first come, first served, or lower priority first", ("fcfs", "priority")),
    "scheduler_delay_factor": Foreign("prompts begin as soon as there is room", (0, 0.0)),
    "max_num_partial_prefills": _ANY,
    "max_long_partial_prefills": _ANY,
    "long_prefill_token_threshold": _ANY,
    "num_scheduler_steps": _ANY,
    "stream_interval": Foreign("outputs come with every step", (1,)),
    "async_scheduling": _ANY,
    "disable_async_output_proc": _ANY,
    "disable_cascade_attn": _ANY,
    "use_v2_block_manager": _ANY,
    "prefix_caching_hash_algo": _ANY,
    "disable_hybrid_kv_cache_manager": _ANY,
    # compilation, logs
    "compilation_config": Foreign("nothing is compiled by torch; enforce_eager does without graphs", (0,)),
    "cuda_graph_sizes": _ANY,
    "max_seq_len_to_capture": _ANY,
    "max_context_len_to_capture": _ANY,
    "disable_log_stats": _ANY,
    "disable_log_requests": _ANY,
    "enable_log_requests": _ANY,
    "use_tqdm_on_load": _ANY,
    "otlp_traces_endpoint": Foreign("llm.stats() counts, and the server has Prometheus metrics"),
    "collect_detailed_traces": Foreign("llm.stats() counts, and the server has Prometheus metrics"),
    "additional_config": Foreign("there are no other platforms"),
    # drafts, adapters, grammars, pictures, other kinds of prompts
    "speculative_config": Foreign(_NO_SPECULATION),
    "speculative_model": Foreign(_NO_SPECULATION),
    "num_speculative_tokens": Foreign(_NO_SPECULATION),
    "num_lookahead_slots": Foreign(_NO_SPECULATION, (0,)),
    "enable_lora": Foreign(_NO_LORA, (False,)),
    "enable_lora_bias": Foreign(_NO_LORA, (False,)),
    "max_loras": _ANY,
    "max_lora_rank": _ANY,
    "max_cpu_loras": _ANY,
    "lora_extra_vocab_size": _ANY,
    "lora_dtype": _ANY,
    "fully_sharded_loras": _ANY,
    "enable_prompt_adapter": Foreign(_NO_LORA, (False,)),
    "guided_decoding_backend": _ANY,
    "structured_outputs_config": Foreign(_ONE_GRAMMAR),
    "reasoning_parser": Foreign("outputs are text as the model writes it"),
    "logits_processors": Foreign("a request brings its own: SamplingParams(logits_processors=[...])"),
    "logits_processor_pattern": Foreign("a request brings its own: SamplingParams(logits_processors=[...])"),
    "limit_mm_per_prompt": Foreign(_TEXT_ALONE),
    "mm_processor_kwargs": Foreign(_TEXT_ALONE),
    "disable_mm_preprocessor_cache": _ANY,
    "mm_processor_cache_gb": _ANY,
    "interleave_mm_strings": Foreign(_TEXT_ALONE, (False,)),
    "allowed_local_media_path": Foreign(_TEXT_ALONE),
    "enable_prompt_embeds": Foreign(_TEXT_ALONE, (False,)),
    "pooler_config": Foreign(_GENERATES),
    "override_pooler_config": Foreign(_GENERATES),
    "kv_transfer_config": Foreign("keys and values stay in their engine"),
    "kv_events_config": Foreign("keys and values stay in their engine"),
}

# Values of options that both have, which vLLM spells otherwise.
_OTHER_SPELLINGS: dict[str, dict[object, str]] = {
    "generation_config": {"vllm": "none"},
    "logprobs_mode": {"raw_logprobs": "raw", "processed_logprobs": "processed"},
}
# Options that both have, where vLLM's None says what leaving them out says.
_NONE_IS_LEFT_OUT = frozenset({"seed", "block_size", "enable_prefix_caching", "enable_chunked_prefill", "max_num_seqs"})


def in_our_spelling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, with vLLM's values for them as Ramify's."""
    return {
        name: _OTHER_SPELLINGS.get(name, {}).get(value, value) if isinstance(value, str) else value
        for name, value in options.items()
        if value is not None or name not in _NONE_IS_LEFT_OUT
    }


# Fields of vLLM's SamplingParams.
SAMPLING_FIELDS: dict[str, Foreign] = {
    "guided_decoding": Foreign(_ONE_GRAMMAR),
    "truncate_prompt_tokens": Foreign("prompts are never cut: cut the token ids yourself"),
    "spaces_between_special_tokens": Foreign("text is decoded as the tokenizer says", (True,)),
    "extra_args": Foreign("there is nobody to read them"),
    "flat_logprobs": Foreign("logprobs are one dict per token, made when read", (False,)),
    "skip_reading_prefix_cache": Foreign("use LLM(enable_prefix_caching=False)", (False,)),
    "use_beam_search": Foreign("use strategy='beam_search' with beam_width", (False,)),
    "output_text_buffer_length": Foreign("text that may be a stop string's beginning is held back anyway", (0,)),
}

# Keywords of vLLM's LLM.generate, LLM.chat and LLM.beam_search.
_LORA = Foreign(_NO_LORA)
GENERATE_KEYWORDS: dict[str, Foreign] = {
    "lora_request": _LORA,
    "prompt_adapter_request": _LORA,
    "guided_options_request": Foreign(_ONE_GRAMMAR),
    "prompt_token_ids": Foreign("give the token ids as prompts, or {'prompt_token_ids': [...]}"),
    "tokenization_kwargs": Foreign("encode with llm.get_tokenizer(), and give token ids"),
    "mm_processor_kwargs": Foreign(_TEXT_ALONE),
    "trace_headers": Foreign("llm.stats() counts, and the server has Prometheus metrics"),
    "concurrency_limit": _ANY,
}
CHAT_KEYWORDS: dict[str, Foreign] = {
    **GENERATE_KEYWORDS,
    "chat_template_content_format": Foreign("parts of text are joined", ("auto", "string")),
}

# Attributes of vLLM's LLM.
ATTRIBUTES: dict[str, str] = {
    "llm_engine": "llm.core is the engine, llm.stats() its counters, llm.config its configuration",
    "encode": "there are no poolers; llm.get_tokenizer().encode makes token ids",
    "embed": "models generate text, and nothing else",
    "classify": "models generate text, and nothing else",
    "reward": "models generate text, and nothing else",
    "score": "there are no scoring models; SamplingParams(prompt_logprobs=0, max_tokens=0) gives a text's logprobs",
    "collective_rpc": "there are no workers: llm.core and llm.load_weights are in this process",
    "apply_model": "there are no workers: llm.core and llm.load_weights are in this process",
    "get_metrics": "llm.stats() counts, and the server has Prometheus metrics",
    "start_profile": "use torch.profiler around generate",
    "stop_profile": "use torch.profiler around generate",
    "set_tokenizer": "name the tokenizer when the model is loaded: LLM(model, tokenizer=...)",
    "preprocess_chat": "llm.render_chat gives the text, llm.get_tokenizer() its token ids",
    "wait_for_completion": "generate and chat return when all is done",
    "enqueue": "AsyncLLM.generate begins at once and returns a stream",
}
