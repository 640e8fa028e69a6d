"""What `bench run` and `bench tasks` measure: a MODEL behind our own server, or servers by URL."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headstart.bench.variants import Variant, base_of, parse_compare, parse_urls
from headstart.bench.workload import CountTokens
from headstart.errors import ConfigError, MissingExtra

DEMO = "demo"
_DEFAULT_COMPARE = "0,3"


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Servers and variants."""

    url: list[str] | None = field(
        default=None,
        metadata={"help": "a server to measure, as URL or NAME=URL; several are compared"},
    )
    compare: str | None = field(
        default=None,
        metadata={
            "help": "variants of Headstart's server: off,0,3,auto,3+vocab=NAME,"
            f"3+chunked-prefill=off; default for a MODEL: {_DEFAULT_COMPARE}"
        },
    )
    base: str | None = field(
        default=None,
        metadata={"help": "variant to compare with; default: the one without drafts, or the first"},
    )
    served_model: str | None = field(
        default=None, metadata={"help": "model to ask the server for; default: the first it lists"}
    )
    tokenizer: Path | None = field(
        default=None, metadata={"help": "checkpoint folder whose tokenizer counts; default: MODEL"}
    )
    device: str = field(default="auto", metadata={"help": "of a MODEL: cpu, cuda or auto"})
    dtype: str = field(default="auto", metadata={"help": "of a MODEL: float32, bfloat16 or auto"})
    server_flags: str = field(
        default="", metadata={"help": "more flags of `headstart serve` for a MODEL, in one string"}
    )
    timeout_seconds: float = field(default=600.0, metadata={"help": "longest time for one answer"})


@dataclass(frozen=True)
class Targets:
    """The variants, where they are served, and how tokens are counted."""

    variants: list[Variant]
    base: Variant
    model: str | None  # None: by URL
    options: TargetOptions
    head: Path | None

    @contextmanager
    def served(self, max_concurrency: int) -> Iterator[list[Variant]]:
        """The variants with addresses, for as long as the context lasts."""
        if self.model is None:
            yield self.variants
            return
        from headstart.bench.own_server import own_servers

        try:
            import uvicorn  # noqa: F401
        except ModuleNotFoundError:
            raise MissingExtra(
                "a MODEL is measured behind our own server and uvicorn is not installed. Install "
                "headstart[serve], or give servers with --url."
            ) from None
        with own_servers(
            self.model, self.variants, max_concurrency=max_concurrency, flags=self._flags()
        ) as variants:
            yield variants

    def _flags(self) -> list[str]:
        own = shlex.split(self.options.server_flags)
        flags = ["--device", self.options.device, "--dtype", self.options.dtype]
        if self.head is not None:
            flags += ["--head", str(self.head)]
        if self.model == DEMO:
            flags += _demo_flags(own)
        return [*flags, *own]

    def token_counter(self) -> tuple[CountTokens | None, int | None]:
        """The model's tokenizer as a function and the size of its vocabulary, where known."""
        folder = self.options.tokenizer or self.model
        if folder is None:
            return None, None
        from headstart.bench.tokens import token_counter
        from headstart.checkpoint.config import read_json_object
        from headstart.checkpoint.hub import local_folder

        path = local_folder(folder)
        config = path / "config.json"
        size = read_json_object(config).get("vocab_size") if config.is_file() else None
        return token_counter(path), size if isinstance(size, int) else None


def _demo_flags(given: list[str]) -> list[str]:
    """As `headstart demo` runs its model, where nothing else was asked for."""
    from headstart.demo.shipped import shipped_vocab

    flags = [] if "--weights" in given else ["--weights", "int8"]
    vocab = shipped_vocab()
    if vocab is not None and "--draft-vocab" not in given:
        flags += ["--draft-vocab", str(vocab)]
    return flags


def make_targets(
    model: str | None, options: TargetOptions, *, head: Path | None, compare: str | None = None
) -> Targets:
    """Refuses what does not fit together; `compare` (of a sweep) is used instead of --compare."""
    urls, wanted = options.url or [], compare or options.compare
    if (model is None) == (not urls):
        found = "both a MODEL and --url" if urls else "neither a MODEL nor --url"
        raise ConfigError(f"{found} given; give one of them.")
    if model is None:
        unused = {"--head": head, "--server-flags": options.server_flags}
        for name in (name for name, value in unused.items() if value):
            raise ConfigError(f"{name} and --url were both given; it is of use for a MODEL only.")
        variants = _of_urls(parse_urls(urls), wanted)
    else:
        variants = parse_compare(wanted or _DEFAULT_COMPARE)
    return Targets(variants, base_of(variants, options.base), model, options, head)


def _of_urls(servers: list[Variant], wanted: str | None) -> list[Variant]:
    if wanted is None:
        return servers
    if len(servers) > 1:
        raise ConfigError(
            f"--compare (or k) and {len(servers)} --url were given; give one Headstart server with "
            "--compare, or one server for each variant without it."
        )
    variants = parse_compare(wanted)
    fixed = [variant.name for variant in variants if variant.server_flags]
    if fixed:
        raise ConfigError(
            f"{fixed[0]} needs a server that was started so: give a MODEL, or its server as --url."
        )
    return [
        Variant(name=v.name, url=servers[0].url, drafts=v.drafts, fields=v.fields) for v in variants
    ]
