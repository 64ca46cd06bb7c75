"""Secrets in text: passwords and signatures in URLs, keys of known forms, and what the environment holds under a name such as
WANDB_API_KEY.

Whatever is recorded with a run can be read by everybody who sees the run. So an experiment that holds a secret is refused
(`secret_in`), and texts that come from elsewhere, such as the command line, are recorded without it (`without_secrets`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

HIDDEN = "***"
SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH_STRING)(?:_|$)", re.IGNORECASE
)
SHORTEST_VALUE = 8  # shorter ones (`1`, `test`) would be found in ordinary words
URL_PASSWORD = re.compile(r"(?<=://)[^/\s?#@:]*:[^/\s?#]*@")  # up to the last @, which may stand in a password
# Who has a signed address (of Azure, Google, Amazon) or one with a token can read what it names, as with a password.
URL_KEY = re.compile(
    r"(?i)(?<=[?&;])((?:(?:x-(?:goog|amz)-)?(?:sig|signature|credential|security-token)"
    r"|(?:access|auth|api)?[_-]?(?:token|key)|secret|password|passwd)=)[^\s&;#'\"\]},]+"
)
# Providers of models, data and services that this platform talks to mark their keys so that they can be found.
KEY_FORMS = re.compile(
    r"\b(?:(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abps]-[A-Za-z0-9-]{10,}|pn[ub]_[A-Za-z0-9]{16,})"
)
ASSIGNED = re.compile(r"(?i)([\w.-]*(?:api[_-]?key|access[_-]?key|token|secret|password|passwd)\s*[=:]\s*)([^\s,}]+)")


def _from_environment() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        # A path tells where a secret lies, and is none itself.
        if SECRET_VARIABLE.search(name) and len(value) >= SHORTEST_VALUE and not value.startswith(("/", "~", ".")):
            yield name, value


def secret_in(text: str) -> str | None:
    """What kind of secret a text holds, in words that do not show it; None if there is none."""
    if URL_PASSWORD.search(text):
        return "a password in a URL"
    if any(found[0].partition("=")[2] != HIDDEN for found in URL_KEY.finditer(text)):
        return "a key in a URL"
    for name, value in _from_environment():
        if value in text:
            return f"what the environment variable {name} holds"
    return "what looks like a key" if KEY_FORMS.search(text) else None


def without_secrets(text: str) -> str:
    """The text with `***` for each secret; of a URL the user and the password are left out."""
    for _, value in sorted(_from_environment(), key=lambda item: -len(item[1])):
        text = text.replace(value, HIDDEN)
    text = KEY_FORMS.sub(HIDDEN, URL_KEY.sub(rf"\1{HIDDEN}", URL_PASSWORD.sub("", text)))
    return ASSIGNED.sub(lambda found: f"{found[1]}{HIDDEN}", text)
