"""Asks an OpenAI-compatible server for answers: one request at a time here, many at once in `regenerate_server`.

What can pass is tried again after a pause that doubles, with a random part so that many requests do not return together:
no connection, a broken one, no answer in time, 408, 409, 425, 429 and 5xx; a `Retry-After` is obeyed. What would be the same
for every row (401, 403, 404, a redirection) ends the job at once. Anything else concerns the one row.

The key stands in a header and nowhere else: it is cut out of whatever a server writes back.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx2

from dflash_core.data.regenerate_tally import ServerError
from dflash_core.data.regenerate_turns import NewAnswer, apart, as_request
from dflash_core.data.sources import one_line
from dflash_core.data.turns import Message, parse_turns
from dflash_core.errors import ConfigError

PASSING = frozenset({408, 409, 425, 429})
# The same for every row: a wrong key, a wrong name of the model, a wrong address.
FOR_ALL_ROWS = frozenset({401, 403, 404, 405})
FINISH_REASONS = ("stop", "tool_calls", "length")
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_RETRY_AFTER_S = 0.5, 60.0, 600.0
CONNECT_TIMEOUT_S = 20.0


class Refused(Exception):
    """One row was not answered. `passing`: it may be another time; `lost`: there was no connection to the server."""

    def __init__(self, status: int | None, text: str, *, passing: bool = False, lost: bool = False) -> None:
        super().__init__(text)
        self.status, self.text, self.passing, self.lost = status, text, passing, lost


class _Passing(Exception):
    """A try failed in a way that can pass; `after_s` is what the server asks to wait."""

    def __init__(self, status: int | None, text: str, after_s: float | None = None, *, lost: bool = False) -> None:
        self.status, self.text, self.after_s, self.lost = status, text, after_s, lost


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What every request says, and how it is tried. `template_variables` go to the server's chat template."""

    max_new_tokens: int
    temperature: float
    template_variables: Mapping[str, bool | int | str]
    retries: int
    timeout_s: float
    concurrency: int


@dataclass(slots=True)
class Counts:
    """Requests that were answered, and tries that were made again, by what was wrong."""

    num_requests: int = 0
    retried: dict[str, int] = field(default_factory=dict)


def check_base_url(url: str) -> str:
    """The URL without a slash at its end; raises ConfigError unless it is a plain http(s) address."""
    key = "regenerate.base_url"
    if not url.isprintable():
        raise ConfigError(f"{key}: not a URL (it holds a line end or another character that cannot be printed)")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{key}: not a URL ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: not an http address; for example http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{key}: holds more than an address; a key belongs in the variable that regenerate.api_key_env names")
    return url.rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether the address is on this machine; no proxy is asked for it then."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class AnswerClient:
    """One server. Used as `async with`; it owns its connections.

    Args:
        model: name of the target there; None: the only one that it serves, known after `find_model`.
        key: sent as a bearer token.
    """

    def __init__(self, base_url: str, model: str | None, key: str | None, settings: RequestSettings) -> None:
        self.base_url, self.model, self._key, self._settings = check_base_url(base_url), model, key, settings
        self.counts = Counts()
        self._random = random.Random()  # noqa: S311 - spreads pauses
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(settings.timeout_s, connect=min(CONNECT_TIMEOUT_S, settings.timeout_s), pool=None),
            limits=httpx2.Limits(max_connections=settings.concurrency + 1, max_keepalive_connections=settings.concurrency + 1),
            trust_env=not is_loopback(base_url),
        )

    async def __aenter__(self) -> AnswerClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    # ---- what is asked ----

    async def find_model(self) -> dict[str, Any]:
        """What the server says of the target; settles `model`.

        Raises:
            ConfigError: the key is refused, or the name is not given and the server serves none or several.
            ServerError: it cannot be reached.
        """
        try:
            found = (await self._tried("GET", "/models", None)).get("data")
        except Refused as error:
            if error.lost or self.model is None or error.status != 404:
                raise ServerError(f"{self.base_url}: no server of the target ({error.text})") from None
            found = []  # some servers list nothing; the first request tells
        models = [item for item in found if isinstance(item, dict) and "id" in item] if isinstance(found, list) else []
        names = sorted(str(item["id"]) for item in models)
        if self.model is None:
            if len(names) != 1:
                listed = ", ".join(names[:20]) or "none"
                raise ConfigError(f"regenerate.model: name the target; {self.base_url} serves {listed}")
            self.model = names[0]
        elif names and self.model not in names and not _lists_more(models):
            raise ConfigError(
                f"regenerate.model: {self.base_url} does not serve {self.model!r}; it serves {', '.join(names[:20])}"
            )
        listed_as = next((item for item in models if item["id"] == self.model), {})
        return {key: listed_as[key] for key in ("id", "root", "owned_by", "max_model_len") if listed_as.get(key) is not None}

    async def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> NewAnswer:
        """The target's answer to a conversation.

        Raises:
            BadRow: the answer cannot be used.
            Refused: the row is not answered.
            ConfigError, ServerError: no row would be.
        """
        settings = self._settings
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [as_request(message) for message in messages],
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
        }
        if tools:
            body["tools"] = list(tools)
        if settings.template_variables:
            body["chat_template_kwargs"] = dict(settings.template_variables)
        try:
            answer = _answer(await self._tried("POST", "/chat/completions", body))
        except Refused as error:
            if error.lost:
                await self._make_sure_it_lives(error)
            elif error.status in FOR_ALL_ROWS:
                raise ConfigError(f"{self.base_url} (model {self.model!r}): {error.text}") from None
            raise
        self.counts.num_requests += 1
        return answer

    async def _make_sure_it_lives(self, error: Refused) -> None:
        try:
            await self._once("GET", "/models", None)
        except _Passing as gone:
            if gone.lost:
                raise ServerError(f"{self.base_url}: the server is gone ({error.text})") from None
        except Refused:
            pass

    # ---- how it is asked ----

    async def _tried(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON object that the server answers with, after as many tries as it takes; raises Refused."""
        for number in range(self._settings.retries + 1):
            try:
                return await self._once(method, path, body)
            except _Passing as error:
                last = error
            name = str(last.status or last.text.split(" ")[0])
            if number < self._settings.retries:
                self.counts.retried[name] = self.counts.retried.get(name, 0) + 1
                await asyncio.sleep(self._pause_s(number, last.after_s))
        tries = f" ({self._settings.retries + 1} tries)" if self._settings.retries else ""
        raise Refused(last.status, f"{last.text}{tries}", passing=True, lost=last.lost)

    def _pause_s(self, number: int, asked_s: float | None) -> float:
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**number) * self._random.uniform(0.5, 1.0)
        return pause if asked_s is None else min(LONGEST_RETRY_AFTER_S, asked_s) + pause / 10

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self._settings.timeout_s):  # httpx2 counts from the last byte, which may drip
                response = await self._http.request(method, self.base_url + path, content=content, headers=headers)
        except (httpx2.TimeoutException, TimeoutError) as error:
            lost = isinstance(error, httpx2.ConnectTimeout)
            raise _Passing(None, f"timeout after {self._settings.timeout_s:g} s", lost=lost) from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError) as error:
            text = one_line(self._without_key(str(error))) or type(error).__name__
            raise _Passing(None, f"connection: {text}", lost=True) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Refused(None, one_line(self._without_key(str(error))) or type(error).__name__) from None
        status = response.status_code
        if status in PASSING or status >= 500:
            raise _Passing(status, self._text(response), _retry_after_s(response.headers.get("Retry-After")))
        if 300 <= status < 400:
            raise ConfigError(
                f"regenerate.base_url: {self.base_url} answers with a redirection ({status}); name the place itself"
            )
        if status in (401, 403):
            raise ConfigError(f"{self.base_url}: the server refuses the key, or the lack of one ({self._text(response)})")
        if status >= 400:
            raise Refused(status, self._text(response))
        try:
            value = response.json()
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Refused(status, f"{status}: not a JSON object: {self._text(response)}")
        return value

    def _text(self, response: httpx2.Response) -> str:
        """Status and what the server says about it, in one short line."""
        text = response.text
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        for key in ("error", "detail", "message"):
            if isinstance(value, dict) and key in value:
                value = value[key]
        said = value if isinstance(value, str) else text if value is None else json.dumps(value, ensure_ascii=False)
        # Cut after the key is out: the cut could leave half of it.
        return f"{response.status_code} {one_line(self._without_key(said), 300)}".strip()

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _lists_more(models: Sequence[Mapping[str, Any]]) -> bool:
    """`transformers serve` without a model of its own loads any; what it lists are those in its cache."""
    return any("status" in item for item in models) and len(models) != 1


def _retry_after_s(value: str | None) -> float | None:
    """Seconds from a `Retry-After`, which is a number of them or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds == seconds else None  # a NaN is not itself


def _answer(value: Mapping[str, Any]) -> NewAnswer:
    """The answer in a chat completion; raises Refused, or BadRow for what no conversation can hold."""
    try:
        choice = value["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = message.get("tool_calls") or []
        usage = value.get("usage") or {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    except (LookupError, TypeError, AttributeError):
        raise Refused(200, "not a chat completion") from None
    if reason not in FINISH_REASONS:
        raise Refused(200, f"finish_reason {one_line(repr(reason), 40)}: the answer did not come to its end")
    if not isinstance(content, str):
        raise Refused(200, "not a chat completion: content is not a text")
    if reasoning is None:
        content, reasoning = apart(content, reason)
    prompt_tokens, tokens = (count if isinstance(count, int) else None for count in counts)
    if not content.strip() and not calls:
        return NewAnswer("", reason, str(reasoning) if reasoning else None, (), prompt_tokens, tokens)
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
    checked = parse_turns([turn], "answer")[0]
    return NewAnswer(checked.content, reason, checked.reasoning, checked.tool_calls, prompt_tokens, tokens)
