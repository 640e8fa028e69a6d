"""What `bench run` and `bench tasks` measure: a MODEL behind our own server, or servers by URL."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.bench.target import Target
from headstart.bench.variants import Variant, base_of, parse_compare, parse_urls
from headstart.bench.workload import Api, Workload
from headstart.cli.demo_defaults import is_demo
from headstart.cli.models import check_head, check_model
from headstart.data.api_keys import API_KEY_VARIABLE
from headstart.errors import ConfigError, MissingExtra, install

if TYPE_CHECKING:
    from headstart.bench.arrivals import LoadOptions
    from headstart.bench.cells import Point
    from headstart.bench.facts import Facts
    from headstart.bench.study import Study

_DEFAULT_COMPARE, _AUTO = "0,3", "auto"


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
            "help": "variants of Headstart's server: off,0,3,auto,auto+draft-from=head,"
            f"3+vocab=NAME,3+chunked-prefill=off; default for a MODEL: {_DEFAULT_COMPARE}"
        },
    )
    base: str | None = field(
        default=None,
        metadata={"help": "variant to compare with; default: the one without drafts, or the first"},
    )
    served_model: str | None = field(
        default=None, metadata={"help": "model to ask the server for; default: the first it lists"}
    )
    api_key_env: str | None = field(
        default=None,
        metadata={"help": f"variable with the key of --url; default: {API_KEY_VARIABLE}"},
    )
    tokenizer: Path | None = field(
        default=None,
        metadata={"help": "folder whose tokenizer counts; default: MODEL, or the server's own"},
    )
    device: str = field(default=_AUTO, metadata={"help": "of a MODEL: cpu, cuda or auto"})
    dtype: str = field(default=_AUTO, metadata={"help": "of a MODEL: float32, bfloat16 or auto"})
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

        if find_spec("uvicorn") is None:
            raise MissingExtra(
                "a MODEL is measured behind our own server and uvicorn is not installed. Install "
                f"it ({install('serve')}), or give servers with --url."
            )
        with own_servers(
            self.model, self.variants, max_concurrency=max_concurrency, flags=self._flags()
        ) as variants:
            yield variants

    def study(
        self, points: Sequence[Point], workload: Workload, load: LoadOptions, *, facts: Facts,
        repeats: int, seed: int,
    ) -> Study:  # fmt: skip
        """What is measured; `served` has the addresses."""
        from headstart.bench.study import Study

        return Study(
            variants=self.variants, points=points, workload=workload, load=load, repeats=repeats,
            seed=seed, model=self.options.served_model, api_key=self.api_key,
            timeout_seconds=self.options.timeout_seconds, count_tokens=facts.count_answers,
        )  # fmt: skip

    def servers(self, max_concurrency: int) -> list[str]:
        """Commands of our own servers, as they are started but for their port."""
        if self.model is None:
            return []
        from headstart.bench.environment import shown_command
        from headstart.bench.own_server import flags_of_servers

        started = flags_of_servers(
            self.variants, max_concurrency=max_concurrency, flags=self._flags()
        )
        return [shown_command(["headstart", "serve", self.model, *own]) for own in started.values()]

    def notes(self, max_concurrency: int) -> list[str]:
        return [f"measured behind our own server: {own}" for own in self.servers(max_concurrency)]

    def _flags(self) -> list[str]:
        try:
            own = shlex.split(self.options.server_flags)
        except ValueError as error:
            raise ConfigError(f"--server-flags cannot be read ({error}); check quotes.") from None
        flags = ["--device", self.options.device, "--dtype", self.options.dtype]
        if self.head is not None:
            flags += ["--head", str(self.head)]
        if is_demo(self.model):
            flags += [] if "--weights" in own else ["--weights", "int8"]  # as `headstart demo`
        return [*flags, *own]

    @property
    def api_key(self) -> str | None:
        """None: as the environment has it, if it has one."""
        name = self.options.api_key_env
        if name is None:
            return None
        key = os.environ.get(name)
        if not key:
            raise ConfigError(f"--api-key-env is {name}, and no such variable is set; export it.")
        return key

    def facts(self, api: Api | None = None, *, is_offline: bool = False) -> Facts:
        """What the folder or the servers say about their API and tokens; no server if offline."""
        from headstart.bench.asking import Asking
        from headstart.bench.facts import Facts, facts_of_folder, facts_of_servers
        from headstart.checkpoint.hub import local_folder

        options = self.options
        tokenizer = None if options.tokenizer is None else local_folder(options.tokenizer)
        if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
            raise ConfigError(
                f"--tokenizer is {tokenizer}, which holds no tokenizer.json; give one that does."
            )
        if self.model is not None:
            check_model(self.model)
            check_head(self.head)
            return facts_of_folder(local_folder(self.model), api, tokenizer=tokenizer)
        if is_offline:
            return Facts(api=api or "chat")
        servers = [
            Asking(
                Target(
                    url=url, model=options.served_model, api_key=self.api_key,
                    timeout_seconds=options.timeout_seconds,
                )
            )
            for url in dict.fromkeys(variant.url for variant in self.variants)
        ]  # fmt: skip
        return facts_of_servers(servers, api, tokenizer=tokenizer)


def make_targets(
    model: str | None, options: TargetOptions, *, head: Path | None, compare: str | None = None
) -> Targets:
    """Refuses what does not fit together; `compare` (of a sweep) is used instead of --compare."""
    urls, wanted = options.url or [], compare or options.compare
    if (model is None) == (not urls):
        found = "both a MODEL and --url" if urls else "neither a MODEL nor --url"
        raise ConfigError(f"{found} given; give one of them.")
    if model is None:
        unused = {
            "--head": head is not None, "--server-flags": bool(options.server_flags),
            "--device": options.device != _AUTO, "--dtype": options.dtype != _AUTO,
        }  # fmt: skip
        for name in (name for name, is_given in unused.items() if is_given):
            raise ConfigError(f"{name} and --url were both given; it is of use for a MODEL only.")
        variants = _of_urls(parse_urls(urls), wanted)
    else:
        if options.api_key_env is not None:
            raise ConfigError("--api-key-env and a MODEL were both given; it is for --url only.")
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
        instead = ",".join(
            "0" if v.name == "off" else str(v.drafts) for v in variants if v.name not in fixed[1:]
        )
        what = "a server without a head" if fixed[0] == "off" else "a server that was started so"
        raise ConfigError(
            f"--compare has {fixed[0]}, which needs {what}, and {servers[0].url} is one server. "
            f"Give --compare {instead} (0: requests that do not draft), a MODEL, or a server for "
            "each variant: --url off=URL --url auto=URL."
        )
    return [
        Variant(name=v.name, url=servers[0].url, drafts=v.drafts, fields=v.fields) for v in variants
    ]
