"""Every metric the server exposes, as a table: names, meanings, labels and buckets.

Each is exposed as `headstart:NAME`; where vLLM has the same, also under its own name with its own
buckets, so that dashboards and `vllm bench serve` work unchanged. docs/metrics.md is generated from
this table.

A label has the values that are listed here and no others, whatever clients send: each value is
memory, and a line of every scrape, for as long as the server runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headstart.engine.options import MAX_DRAFTS

Kind = Literal["counter", "gauge", "histogram"]
COMMON_LABELS = ("model_name", "engine")  # of every metric; `engine` is always "0" here
OTHER = "other"  # in place of any value that is not listed


@dataclass(frozen=True)
class Label:
    """A label and all its values; () for a setting of this server, which is one value at a time."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """One row; a counter's name is without the `_total` that the exposition adds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    alias: str | None = None  # whole name
    alias_buckets: tuple[float, ...] = ()  # a part of `buckets`; () for all of them

    @property
    def own(self) -> str:
        return f"headstart:{self.name}"

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def exposed(self) -> tuple[str, ...]:
        """Names as PromQL spells them; of histograms without `_bucket`, `_sum` and `_count`."""
        ending = "_total" if self.kind == "counter" else ""
        return tuple(name + ending for name in (self.own, self.alias) if name is not None)


_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0)  # fmt: skip
_FINE_ITL = (0.001, 0.002, 0.003, 0.005, 0.0075, *_ITL)  # drafts make gaps that vLLM's do not show
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
         10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
            120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_FINE_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.2, *_LATENCY)
_TOKENS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
                 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # fmt: skip
_HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)

# Routes by their templates; `none` where no route matched.
_ROUTES = (
    "/", "/detokenize", "/docs", "/health", "/load", "/metrics", "/openapi.json", "/ping",
    "/push_head", "/reset_prefix_cache", "/server_info", "/tokenize", "/tokenizer_info", "/version",
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name:path}",
    "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "none",
)  # fmt: skip
_CODES = (200, 307, 400, 401, 403, 404, 405, 408, 413, 415, 429, 499, 500, 501, 503)
_HANDLER = Label("handler", _ROUTES)
_METHOD = Label("method", ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "none"))
_POSITION = Label("position", tuple(str(depth) for depth in range(MAX_DRAFTS)))
_SOURCE = Label("source", ("head", "context"))
_DRAFTS = Label("drafts", tuple(str(drafts) for drafts in range(MAX_DRAFTS + 1)))


def _counter(name: str, text: str, *labels: Label, shared: bool = False) -> Metric:
    return Metric(name, "counter", text, labels, alias=f"vllm:{name}" if shared else None)


def _gauge(name: str, text: str, *labels: Label, shared: bool = False) -> Metric:
    return Metric(name, "gauge", text, labels, alias=f"vllm:{name}" if shared else None)


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], alias_buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(name, "histogram", text, (), buckets, f"vllm:{name}", alias_buckets)


SPECULATION = (
    _counter("spec_decode_num_drafts", "verification rounds that had drafts, of each request",
             shared=True),
    _counter("spec_decode_num_draft_tokens", "draft tokens that were verified", shared=True),
    _counter("spec_decode_num_accepted_tokens",
             "accepted draft tokens; recovered and bonus tokens are not among them", shared=True),
    _counter("spec_decode_num_accepted_tokens_per_pos",
             "accepted draft tokens by position (depth 1 is position 0)", _POSITION, shared=True),
    _counter("spec_decode_num_draft_tokens_per_pos", "verified draft tokens by position",
             _POSITION),
    _counter("spec_decode_num_draft_tokens_by_source",
             "draft tokens that were verified, by source: head, or context (copied)", _SOURCE),
    _counter("spec_decode_num_accepted_tokens_by_source", "accepted draft tokens by source",
             _SOURCE),
    _gauge("spec_decode_draft_acceptance_rate",
           "accepted over verified drafts in the last minute that had any; NaN before the first",
           shared=True),
    _gauge("spec_decode_acceptance_length",
           "tokens per round in the last minute that had rounds, those without drafts included"),
    _counter("decode_rounds", "rounds of each request after its first token, with drafts or not"),
    _counter("spec_decode_chosen_drafts", "rounds by the number of their drafts (K)", _DRAFTS),
    _gauge("spec_decode_mean_chosen_drafts",
           "mean K of the rounds in the last minute that had rounds"),
    _gauge("spec_decode_reason",
           "1 for what decides K now: fixed, fastest (auto), off_above or none (nothing drafts)",
           Label("reason", ("fixed", "fastest", "off_above", "none"))),
    _gauge("spec_decode_expected_speedup",
           "tokens/s of the head's chosen drafts over tokens/s without, as auto expects it, mean "
           "of about a hundred rounds; what copies bring is not in it"),
    _gauge("round_cost_seconds",
           "what auto thinks a round costs at the current batch size, by drafts per request; of "
           "greedy requests where those ran last",
           _DRAFTS),
    _gauge("head_version", "swaps of the head that drafts now; 0 for the one of the start"),
    _counter("head_swaps", "heads that were swapped in while the server ran"),
    _counter("trunk_seconds", "seconds in the trunk: prompts and verification"),
    _counter("draft_seconds", "seconds in drafting, choosing K included"),
)  # fmt: skip
LOAD = (
    _gauge("num_requests_running", "samples that are being computed", shared=True),
    _gauge("num_requests_waiting", "samples that wait, the server's own queue included",
           shared=True),
    _gauge("num_requests_waiting_by_reason",
           "the same by reason: capacity, or deferred until a sibling has read the prompt",
           Label("reason", ("capacity", "deferred")), shared=True),
    _gauge("kv_cache_usage_perc", "used share of the K/V blocks, 0 to 1", shared=True),
    _gauge("kv_cache_blocks", "K/V blocks that are used, cached (free, content known) or free",
           Label("state", ("used", "cached", "free"))),
    _counter("num_preemptions", "samples that lost their memory and began again", shared=True),
    _counter("prefix_cache_queries", "prompt tokens that were looked up", shared=True),
    _counter("prefix_cache_hits", "prompt tokens that were found", shared=True),
    _counter("external_prefix_cache_queries", "0: there is no cache outside of the engine",
             shared=True),
    _counter("external_prefix_cache_hits", "0: there is no cache outside of the engine",
             shared=True),
    _gauge("cache_config_info", "1; the labels say how the K/V memory is set up",
           Label("block_size"), Label("num_gpu_blocks"), Label("enable_prefix_caching"),
           Label("cache_dtype"), shared=True),
    _gauge("engine_sleep_state", "1 for the state: always awake",
           Label("sleep_state", ("awake",)), shared=True),
)  # fmt: skip
TOKENS = (
    _counter("prompt_tokens", "prompt tokens, cached ones included; again when read again",
             shared=True),
    _counter("prompt_tokens_by_source", "the same by source: local_compute, local_cache_hit",
             Label("source", ("local_compute", "local_cache_hit")), shared=True),
    _counter("prompt_tokens_cached", "prompt tokens that the prefix cache saved", shared=True),
    _counter("generation_tokens", "tokens that were given out", shared=True),
    _histogram("iteration_tokens_total", "tokens read and made by one step", _STEP_TOKENS),
)  # fmt: skip
REQUESTS = (
    _counter("request_success", "samples that ended, by reason: stop, length, abort, error",
             Label("finished_reason", ("stop", "length", "abort", "error")), shared=True),
    _histogram("time_to_first_token_seconds", "from arrival to the first token", _TTFT),
    _histogram("inter_token_latency_seconds",
               "between two outputs of a sample; each may hold several tokens", _FINE_ITL, _ITL),
    _histogram("request_time_per_output_token_seconds",
               "mean of a sample: time after the first output over the tokens that came after "
               "the first", _FINE_ITL, _ITL),
    _histogram("e2e_request_latency_seconds", "from arrival to the end", _FINE_LATENCY, _LATENCY),
    _histogram("request_queue_time_seconds", "from arrival until it ran", _FINE_LATENCY, _LATENCY),
    _histogram("request_prefill_time_seconds", "from running to the first token", _FINE_LATENCY,
               _LATENCY),
    _histogram("request_decode_time_seconds", "from the first token to the end", _FINE_LATENCY,
               _LATENCY),
    _histogram("request_inference_time_seconds", "from running to the end", _FINE_LATENCY,
               _LATENCY),
    _histogram("request_prompt_tokens", "tokens of the prompt", _TOKENS),
    _histogram("request_generation_tokens", "tokens of a sample", _TOKENS),
    _histogram("request_max_num_generation_tokens", "tokens of a request's longest sample",
               _TOKENS),
    _histogram("request_prefill_kv_computed_tokens", "prompt tokens that were not cached",
               _TOKENS),
    _histogram("request_params_n", "samples asked for", (1.0, 2.0, 5.0, 10.0, 20.0)),
    _histogram("request_params_max_tokens", "limit on a sample's tokens", _TOKENS),
)  # fmt: skip
SERVER = (
    Metric("step_duration_seconds", "histogram", "one step of the engine", (), _STEP_SECONDS),
    _gauge("server_state", "1 for the state: starting, ready, draining or dead",
           Label("state", ("starting", "ready", "draining", "dead"))),
    _gauge("build_info", "1; the label says the version", Label("version")),
    Metric("http_requests", "counter", "answers by route, method and class of status (2xx)",
           (_HANDLER, _METHOD, Label("status", ("1xx", "2xx", "3xx", "4xx", "5xx"))),
           alias="http_requests"),
    _counter("http_responses", "answers by route, method and exact status",
             _HANDLER, _METHOD, Label("code", tuple(map(str, _CODES)))),
    Metric("http_request_duration_seconds", "histogram",
           "until the last byte of an answer, streams included", (_HANDLER, _METHOD),
           _HTTP_SECONDS, alias="http_request_duration_seconds"),
)  # fmt: skip
_KIND = Label("kind", (*(str(number) for number in range(1, 9)), OTHER))
_MEASURED = Label("head", ("before", "after"))
LEARNING = (
    _counter("learn_collected_texts", "answers that were kept to learn from"),
    _counter("learn_collected_tokens", "their tokens, prompts included"),
    _counter("learn_lost_texts", "answers that could not be written"),
    _gauge("learn_store_bytes", "what is kept on disk, as the learner has read it"),
    _gauge("learn_texts", "texts that the learner has, by use",
           Label("use", ("train", "heldout"))),
    _counter("learn_steps", "training steps"),
    _counter("learn_seconds", "processor seconds of training steps"),
    _counter("learn_checks", "comparisons of a learned head with the serving one"),
    _counter("learn_swaps", "learned heads that were swapped in"),
    _counter("learn_rollbacks", "learned heads that fell short and were taken back"),
    _counter("learn_failures", "steps, heads and swaps that failed; the log says why"),
    _counter("learn_busy_seconds", "seconds in which requests ran while there was a learner"),
    _counter("learn_shared_seconds", "of these, seconds in which it was let run"),
    _gauge("learn_acceptance_length",
           "on recent held-out answers at the last check, by kind (kind_numbers of status.json; "
           "other: all of them) and head: before is the serving one, after the one that learns",
           _KIND, _MEASURED),
    _gauge("learn_live_first_drafts",
           "accepted first drafts of answers: before the last swap, and after it", _MEASURED),
)  # fmt: skip
GROUPS = {
    "Speculation": SPECULATION, "Load and memory": LOAD, "Tokens": TOKENS, "Requests": REQUESTS,
    "Server": SERVER, "Learning (with --learn)": LEARNING,
}  # fmt: skip
METRICS = {metric.name: metric for group in GROUPS.values() for metric in group}
