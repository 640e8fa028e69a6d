"""A server's options, and the port that it listens on.

Options are one frozen dataclass, which is also the command-line flags. The port is taken before
anything large is imported or loaded, so that a busy one is an error at once.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headstart.data.api_keys import (
    API_KEY_VARIABLE,
    PUSH_KEY_VARIABLE,
    keys_from_environment,
    push_key,
)
from headstart.errors import ConfigError
from headstart.files import read_text, why_unreadable

_BACKLOG = 2048
_MOST_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where to listen, which clients may ask, and how much."""

    host: str = field(
        default="127.0.0.1", metadata={"help": "address to listen on; 0.0.0.0 for all"}
    )
    port: int = field(default=8000, metadata={"help": "port to listen on; 0: any free one"})
    served_model_name: list[str] | None = field(
        default=None,
        metadata={"help": "name of the model for clients, may be repeated; default: MODEL"},
    )
    api_key: list[str] | None = field(
        default=None,
        metadata={
            "help": f"clients must send one of these keys, may be repeated; {API_KEY_VARIABLE} "
            "holds more, separated by commas"
        },
    )
    ssl_certfile: str | None = field(
        default=None, metadata={"help": "TLS: file with the certificate and its chain"}
    )
    ssl_keyfile: str | None = field(
        default=None, metadata={"help": "TLS: file with the key, where it is another one"}
    )
    cors_origin: list[str] | None = field(
        default=None,
        metadata={"help": "web pages of this origin may ask, may be repeated; * for all"},
    )
    max_body_bytes: int = field(default=8 << 20, metadata={"help": "longest request body"})
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "longest prompt; default: what model and memory allow"}
    )
    max_n: int = field(default=16, metadata={"help": "most answers per request, all prompts"})
    max_logprobs: int = field(default=20, metadata={"help": "most alternatives per token"})
    max_stops: int = field(default=64, metadata={"help": "most stop strings per request"})
    allow_priority: bool = field(
        default=False,
        metadata={"help": "clients may say how important their requests are (priority)"},
    )
    allow_cache_reset: bool = field(
        default=False,
        metadata={"help": "clients may empty the cache of prompts (/reset_prefix_cache)"},
    )
    allow_push: bool = field(
        default=False,
        metadata={"help": "the head may be swapped with the push key (`headstart push`)"},
    )
    push_key_file: str | None = field(
        default=None,
        metadata={"help": f"file with the push key; {PUSH_KEY_VARIABLE} holds it as well"},
    )
    max_push_bytes: int = field(default=4 << 30, metadata={"help": "largest head that is taken"})
    separate_key_caches: bool = field(
        default=False,
        metadata={"help": "no key sees, in cached_tokens or time, what prompts another one sent"},
    )
    max_queue: int = field(
        default=256, metadata={"help": "answers that may wait for a place; more get a 429"}
    )
    max_connections: int = field(default=2048, metadata={"help": "connections; more get a 503"})
    request_timeout_seconds: float = field(
        default=600.0, metadata={"help": "longest time for one request, waiting included"}
    )
    step_timeout_seconds: float = field(
        default=600.0, metadata={"help": "an engine step that takes longer ends the process"}
    )
    drain_seconds: float = field(
        default=30.0, metadata={"help": "time for running requests after SIGTERM"}
    )
    max_grammar_bytes: int = field(default=1 << 16, metadata={"help": "largest grammar or schema"})
    max_grammar_seconds: float = field(
        default=20.0, metadata={"help": "longest processor time to compile a grammar"}
    )
    max_template_seconds: float = field(
        default=5.0, metadata={"help": "longest processor time of a chat template for one request"}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "file with a chat template to use instead of the model's"}
    )
    tool_call_parser: str | None = field(
        default=None, metadata={"help": "format of tool calls; default: by the chat template"}
    )
    reasoning_parser: str | None = field(
        default=None, metadata={"help": "format of reasoning; default: by the chat template"}
    )
    log_format: Literal["text", "json"] = field(
        default="text", metadata={"help": "one line a request: text or json"}
    )
    log_prompts: bool = field(default=False, metadata={"help": "put prompts into the log"})

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; give 0 to 65535.")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}; give a number above 0.")
        if self.max_queue < 0 or self.max_logprobs < 0:
            raise ConfigError("--max-queue and --max-logprobs cannot be below 0.")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile is given without --ssl-certfile; give both.")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"--log-format is {self.log_format!r}; give text or json.")
        if any(not name.strip() for name in self.served_model_name or ()):
            raise ConfigError("--served-model-name is empty; give a name, or leave the option out.")
        if any(not key for key in self.api_key or ()):
            raise ConfigError("--api-key is empty; give a key, or leave the option out.")
        if self.separate_key_caches and not self.api_keys:
            raise ConfigError(
                "--separate-key-caches is given and there is no key; give --api-key (or "
                f"{API_KEY_VARIABLE}), or leave it out."
            )
        if any(key != key.strip() for key in self.api_key or ()):
            raise ConfigError("--api-key begins or ends with a blank, which no client can send.")
        self._check_push()

    def _check_push(self) -> None:
        if not self.allow_push:
            if self.push_key_file is not None:
                raise ConfigError("--push-key-file is given without --allow-push; give both.")
            return
        if self.push_key is None:
            raise ConfigError(
                "--allow-push is given and there is no push key; give --push-key-file, or set "
                f"{PUSH_KEY_VARIABLE}."
            )
        if self.push_key in self.api_keys:
            raise ConfigError(
                "the push key is an API key, too, so every client could swap the head. Give it a "
                "value of its own."
            )

    @property
    def push_key(self) -> str | None:
        """What a client must send to swap the head."""
        file = self.push_key_file
        return push_key(None if file is None else Path(file), "--push-key-file")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Keys from the command line and the environment; without any, all clients may ask."""
        return (*(self.api_key or ()), *keys_from_environment())


_POSITIVE = (
    "max_push_bytes", "max_body_bytes", "max_prompt_tokens", "max_n", "max_stops",
    "max_connections", "request_timeout_seconds", "step_timeout_seconds", "drain_seconds",
    "max_grammar_bytes", "max_grammar_seconds", "max_template_seconds",
)  # fmt: skip


def read_template(path: str) -> str:
    """The text of a chat template; ConfigError where it cannot be read."""
    try:
        text = read_text(Path(path), _MOST_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template is {path!r}, which cannot be read ({why_unreadable(error)}). Give a "
            "file with a Jinja template."
        ) from None
    if "messages" not in text:
        raise ConfigError(
            f"--chat-template is {path!r}, which does not mention `messages`; give a Jinja "
            "template for chats."
        )
    return text


def listen(options: ServerOptions) -> socket.socket:
    """A socket that accepts connections; ConfigError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where TCP is named:
    # small events would otherwise wait for the client's acknowledgement, 40 ms each.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(_BACKLOG)  # only now no other process can take it
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port} ({error.strerror}); give another "
            "--host or --port."
        ) from None
    return listener


def is_public(listener: socket.socket) -> bool:
    """Whether other machines can reach it: by the address it has, which --host need not show."""
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return not (mapped or address).is_loopback


def url_of(listener: socket.socket, options: ServerOptions | None = None) -> str:
    """The address at which this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if options is not None and options.ssl_certfile is not None else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_certificate(options: ServerOptions) -> None:
    """ConfigError where the files for TLS cannot be used."""
    if options.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate {options.ssl_certfile!r} with the key "
            f"{options.ssl_keyfile or options.ssl_certfile!r} cannot be used ({error.args[-1]}). "
            "Give PEM files, the key without a passphrase."
        ) from None
