"""A chat template, compiled once, and whether it can only ever append.

Whether a template shows history as it was is usually found out by rendering growing prefixes: two renderings for each
answer. Most templates, however, are one loop over the messages whose body looks at no later message. Then the text of
the first k messages is a prefix of the text of all of them by construction, and one rendering, watched while it runs,
tells where each message ends. `appends_only` proves this from the template's syntax; it says no whenever it is not sure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, nodes

# The compiler has sandbox, filters and `{% generation %}` exactly as apply_chat_template has them.
from transformers.utils.chat_template_utils import _compile_jinja_template

from dflash_core.data.sources import one_line
from dflash_core.data.turns import BadRow
from dflash_core.errors import ConfigError

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MESSAGES, PROMPT_FLAG, LOOP = "messages", "add_generation_prompt", "loop"
PER_CONVERSATION = {MESSAGES, PROMPT_FLAG, LOOP, "tools", "documents"}
STEADY_LOOP_ATTRIBUTES = {"first", "index", "index0"}
OPAQUE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.ContextReference, nodes.Break)
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

Turns = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None


class Trace(NamedTuple):
    """A conversation as text, the `{% generation %}` marks as [start, end), and where each message begins.

    `borders` has one entry more than there are messages; it is None unless the template only appends.
    """

    text: str
    marks: list[tuple[int, int]]
    borders: list[int] | None


class _Watched(list[Any]):
    """Messages that note how much text there was when the template's loop asked for each of them."""

    def __init__(self, items: Iterable[Any], offset: int, blocks: list[str], reached: dict[int, int]) -> None:
        super().__init__(items)
        self._offset, self._blocks, self._reached = offset, blocks, reached

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            return _Watched(found, self._offset + key.indices(len(self))[0], self._blocks, self._reached)
        return found

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(super().__iter__()):
            self._reached[self._offset + index] = len(self._blocks)
            yield item
        self._reached[self._offset + len(self)] = len(self._blocks)


class ChatTemplate:
    """Renders conversations; everything that a template can throw becomes `BadRow`.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        try:
            self._compiled = _compile_jinja_template(source)
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}: {one_line(error.message)}"
            raise ConfigError(f"the target's chat template cannot be compiled ({where})") from error
        # Merged once: jinja would copy its chain of globals for every rendering, which costs as much as the rendering.
        self._variables = {**self._compiled.globals, "documents": None, **variables}
        self.has_marks = GENERATION_MARK.search(source) is not None
        self.appends_only = appends_only(self._compiled.environment.parse(source))

    def text(self, messages: Turns, tools: Tools, *, generation_prompt: bool = False) -> str:
        """The conversation as text; with `generation_prompt` up to the point where the target answers."""
        try:
            return "".join(self._blocks(messages, tools, generation_prompt))
        except REFUSALS as error:
            raise BadRow("template refuses", one_line(error)) from error

    def _blocks(self, messages: Turns, tools: Tools, generation_prompt: bool) -> Iterator[str]:
        """The text piece by piece, as the template writes it."""
        variables = {**self._variables, MESSAGES: messages, "tools": tools, PROMPT_FLAG: generation_prompt}
        blocks: Iterator[str] = self._compiled.root_render_func(self._compiled.new_context(variables, shared=True))
        return blocks

    def trace(self, messages: Turns, tools: Tools) -> Trace:
        """The conversation as text, with what can be seen while it is rendered."""
        if not (self.has_marks or self.appends_only):
            return Trace(self.text(messages, tools), [], None)
        blocks: list[str] = []
        marks: list[tuple[int, int]] = []
        reached: dict[int, int] = {}
        watched = _Watched(messages, 0, blocks, reached) if self.appends_only else messages
        try:
            with self._compiled.environment.activate_tracker(blocks, marks):
                for block in self._blocks(watched, tools, False):
                    blocks.append(block)  # one by one: the list is measured while it grows
        except REFUSALS as error:
            raise BadRow("template refuses", one_line(error)) from error
        borders = _borders(blocks, reached, len(messages)) if self.appends_only else None
        return Trace("".join(blocks), marks, borders)


def _borders(blocks: list[str], reached: dict[int, int], num_messages: int) -> list[int] | None:
    if num_messages not in reached:
        return None
    ends = [0]
    for block in blocks:
        ends.append(ends[-1] + len(block))
    # Messages before the first one of a sliced loop (a system turn) were written before the loop began.
    first = min(reached)
    return [ends[reached[max(index, first)]] for index in range(num_messages + 1)]


# ---- the proof ----


def appends_only(tree: nodes.Template) -> bool:
    """Whether the text of the first k >= 1 messages is always a prefix of the text of more, and what
    `add_generation_prompt` adds to it is the same for every conversation.

    True only for templates of this form: anything that looks at no message but the first; one loop over `messages`
    (or over `messages[n:]`), whose body looks at no message but its own and the first and does not ask how many are
    to come; then nothing but an `if add_generation_prompt`, whose body uses nothing that depends on the conversation.
    """
    aliases = _aliases(tree)
    loops = [index for index, node in enumerate(tree.body) if isinstance(node, nodes.For) and _is_messages(node.iter, aliases)]
    if aliases is None or len(loops) != 1 or any(True for _ in tree.find_all(OPAQUE)):
        return False
    position = loops[0]
    loop = tree.body[position]
    assert isinstance(loop, nodes.For)
    if loop.recursive or loop.test is not None or loop.else_:
        return False
    assigned = _assigned(tree)
    return (
        not assigned & {MESSAGES, PROMPT_FLAG, LOOP}
        and all(_looks_back(node, aliases, None) for node in tree.body[:position])
        and all(_looks_back(node, aliases, MESSAGES) for node in loop.body)
        and all(_adds_prompt_only(node, assigned) for node in tree.body[position + 1 :])
    )


def _is_name(node: object, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_messages(node: nodes.Node, aliases: set[str] | None) -> bool:
    """`messages`, an alias of it, or `messages[n:]` with a constant n >= 0."""
    if isinstance(node, nodes.Name):
        return node.name == MESSAGES or node.name in (aliases or ())
    if not (isinstance(node, nodes.Getitem) and _is_name(node.node, MESSAGES) and isinstance(node.arg, nodes.Slice)):
        return False
    start, stop, step = node.arg.start, node.arg.stop, node.arg.step
    return stop is None and step is None and isinstance(start, nodes.Const) and isinstance(start.value, int) and start.value >= 0


def _aliases(tree: nodes.Template) -> set[str] | None:
    """Names that stand for `messages` or `messages[n:]`; None if one of them also stands for something else."""
    values: dict[str, list[bool]] = {}
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name):
            values.setdefault(node.target.name, []).append(_is_messages(node.node, None))
    mixed = any(any(given) and not all(given) for given in values.values())
    return None if mixed else {name for name, given in values.items() if any(given)}


def _assigned(tree: nodes.Template) -> set[str]:
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx in ("store", "param")}
    return names | {node.name for node in tree.find_all((nodes.NSRef, nodes.Macro))}  # type: ignore[attr-defined]


def _looks_back(node: nodes.Node, aliases: set[str], owner: str | None) -> bool:
    """Whether a part of the template uses no message but the first and the loop's own.

    `owner` says whose `loop` this is: the loop's over the messages, an inner one's, or nobody's.
    """
    if isinstance(node, nodes.Assign) and _is_messages(node.node, aliases) and owner is None:
        return True
    if isinstance(node, nodes.Getitem) and _is_name(node.node, MESSAGES):
        return isinstance(node.arg, nodes.Const) and node.arg.value == 0 and node.arg.value is not False
    if isinstance(node, nodes.Getattr) and _is_name(node.node, LOOP) and owner == MESSAGES:
        return node.attr in STEADY_LOOP_ATTRIBUTES
    if isinstance(node, nodes.Name):
        if node.name in (MESSAGES, PROMPT_FLAG) or node.name in aliases:
            return False
        return not (node.name == LOOP and owner == MESSAGES)
    if isinstance(node, nodes.For):
        outer = [node.iter, *([node.test] if node.test is not None else [])]
        return all(_looks_back(child, aliases, owner) for child in outer) and all(
            _looks_back(child, aliases, "inner") for child in [*node.body, *node.else_]
        )
    if isinstance(node, nodes.Filter) and node.name == "random":
        return False
    return all(_looks_back(child, aliases, owner) for child in node.iter_child_nodes())


def _adds_prompt_only(node: nodes.Node, assigned: set[str]) -> bool:
    if isinstance(node, nodes.Output):
        return all(isinstance(part, nodes.TemplateData) and not part.data for part in node.nodes)
    if not isinstance(node, nodes.If) or node.elif_ or node.else_:
        return False
    tests = [node.test.left, node.test.right] if isinstance(node.test, nodes.And) else [node.test]
    rest = [test for test in tests if not _is_name(test, PROMPT_FLAG)]
    if len(rest) == len(tests):
        return False
    names: set[str] = set()
    for part in [*rest, *node.body]:
        if any(True for _ in part.find_all((nodes.Assign, nodes.AssignBlock, nodes.For, nodes.CallBlock))):
            return False
        names |= {found.name for found in [part, *part.find_all(nodes.Name)] if isinstance(found, nodes.Name)}
    return not names & (assigned | PER_CONVERSATION)
