"""Conversations rendered by a target's chat template, in the spelling that the template reads."""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dspark.capture.bad_row import BadRowError
from dspark.schemas.conversations import Conversation, Message, Part

# A word that no template trims, splits or changes, and that no text holds.
PROBE = "Zqx7Jvw"
_QUESTION = "Kvz4Wqx"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_PICTURES = ("image", "image_url")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Tools = list[dict[str, Any]] | None


class Renderer:
    """Renders conversations as a processor does, or a plain tokenizer of a text-only target.

    Some templates read message contents as text, some as lists of parts, some differ by role; some
    read the arguments of tool calls as mappings, some as JSON. What a template reads is tried out
    on small conversations.

    Attributes:
        processor: what was given.
        tokenizer: of the processor, or itself.
        takes_pictures: whether there is a processor around the tokenizer.
        image_token: the text that the processor expands to a picture's positions, if it names one.
        gives_offsets: the processor returns characters of tokens; set to False when it does not.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.takes_pictures = not isinstance(processor, PreTrainedTokenizerBase)
        self.image_token: str | None = getattr(processor, "image_token", None)
        self.gives_offsets = True
        self._reads_lists: dict[str, bool] = {}

    def text(
        self, messages: Sequence[Message], tools: Tools = None, *, opened: bool = False
    ) -> str:
        """The prompt, picture placeholders not yet expanded.

        Args:
            messages: the conversation, or the beginning of one.
            tools: schemas of the functions that the assistant may call.
            opened: add the generation prompt, as if the assistant were to write next.

        Raises:
            BadRowError: the chat template refuses the conversation.
        """
        spelled = [self._spell(m) for m in messages]
        try:
            return self._render(spelled, tools, opened)
        except Exception as error:  # templates raise what they like
            if any(m.get("tool_calls") for m in messages):
                try:
                    return self._render([_arguments_as_text(m) for m in spelled], tools, opened)
                except Exception:
                    pass
            raise BadRowError("the chat template refuses it", first_line(error)) from None

    def marks(self, messages: Sequence[Message], tools: Tools, text: str) -> list[tuple[int, int]]:
        """Where ``{% generation %}`` puts the assistant's characters in ``text``.

        Empty where the template has no such marks, or the processor renders in a way of its own.
        """
        template = self.processor.chat_template
        if not isinstance(template, str) or not _MARKS.search(template):
            return []
        spelled = [self._spell(m) for m in messages]
        for variant in (spelled, [_arguments_as_text(m) for m in spelled]):
            try:
                rendered, marks = render_jinja_template(
                    conversations=[variant],
                    tools=tools,
                    chat_template=template,
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map,
                )
            except Exception:
                continue
            if rendered[0] == text:
                return [(start, end) for start, end in marks[0]]
        return []

    def tokens(self, prompt: str) -> tuple[list[int], list[tuple[int, int]] | None]:
        """The ids of a prompt, pictures not expanded, and the characters of each.

        The latter are None for a tokenizer that does not give them.
        """
        options = self.token_options(prompt)
        if not self.tokenizer.is_fast:
            return self.tokenizer(prompt, **options)["input_ids"], None
        encoding = self.tokenizer(prompt, return_offsets_mapping=True, **options)
        return encoding["input_ids"], encoding["offset_mapping"]

    def token_options(self, prompt: str) -> dict[str, Any]:
        """Whether the tokenizer adds its own special tokens around a prompt, as ``transformers``
        decides it."""
        bos = self.tokenizer.bos_token
        if not self.takes_pictures or (bos and prompt.startswith(bos)):
            return {"add_special_tokens": False}
        return {}

    @cached_property
    def placeholder_ids(self) -> set[int]:
        """Ids that the processor expands to a picture's positions."""
        if self.image_token is None:
            return set()
        return {self.tokenizer.convert_tokens_to_ids(self.image_token)}

    @cached_property
    def turn_ends(self) -> list[str]:
        """What the template puts after the assistant's text to end a turn, as in ``<|im_end|>``.

        The first special token after the text, with the spaces before it if the template has some
        there. Some templates end the last turn by another token. None where turns end in plain
        text, or where what follows is only the beginning of the next turn.
        """
        question, answer = _message("user", _QUESTION), _message("assistant", PROBE)
        try:
            before = self.text([question]).split(_QUESTION)[0]
            last = self.text([question, answer]).split(PROBE)[-1]
            inner = self.text([question, answer, question]).split(PROBE)[-1].split(_QUESTION)[0]
        except BadRowError:
            return []
        header, rest = self.pieces(before), self.pieces(inner)
        while header and rest and header[-1] == rest[-1]:
            header.pop()
            rest.pop()
        names = "|".join(re.escape(t) for t in self.added_tokens)
        found = (re.match(rf"\s*(?:{names})", text) for text in (last, "".join(rest)))
        return list(dict.fromkeys(f.group() for f in found if f and names))

    @cached_property
    def generation_prompt(self) -> str:
        """What the template puts before an answer for the model to begin it; may be empty."""
        question = _message("user", _QUESTION)
        try:
            opened, closed = (self.text([question], opened=o) for o in (True, False))
        except BadRowError:
            return ""
        after, plain = (text.split(_QUESTION)[-1] for text in (opened, closed))
        return after[len(commonprefix([after, plain])) :]

    def turn_end_at(self, prompt: str, at: int) -> int:
        """The end of a turn whose text ends at ``at``: beyond its end token, if one is there."""
        return at + max((len(e) for e in self.turn_ends if prompt.startswith(e, at)), default=0)

    def pieces(self, text: str) -> list[str]:
        """A text cut before and after each special token and each tag of reasoning."""
        names = "|".join(re.escape(t) for t in (*self.added_tokens, THINK_OPEN, THINK_CLOSE))
        return [p for p in re.split(f"({names})", text) if p]

    @cached_property
    def picture_text(self) -> str:
        """What the template puts where a picture is: the placeholder and what surrounds it."""
        picture: Part = {"type": "image", "image": None}
        text = self.text([{"role": "user", "content": [_text(PROBE), picture, _text(PROBE)]}])
        between = text.split(PROBE)
        assert self.image_token is not None
        if len(between) == 3 and self.image_token in between[1]:
            return between[1]
        return self.image_token

    @cached_property
    def control_tokens(self) -> list[str]:
        """Every text that the tokenizer or the processor takes for something else than text."""
        named = (getattr(self.processor, f"{k}_token", None) for k in ("image", "video", "audio"))
        special = (t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special)
        return sorted({t for t in (*self.tokenizer.all_special_tokens, *named, *special) if t})

    @cached_property
    def added_tokens(self) -> list[str]:
        """Texts that are one token wherever they stand, longest first."""
        texts = {t.content for t in self.tokenizer.added_tokens_decoder.values()}
        return sorted(texts | set(self.tokenizer.all_special_tokens), key=len, reverse=True)

    def _render(self, messages: list[Any], tools: Tools, opened: bool) -> str:
        text = self.processor.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=opened
        )
        assert isinstance(text, str)
        return text

    def _spell(self, message: Message) -> Any:
        content, as_list = message["content"], self._role_reads_lists(message["role"])
        if isinstance(content, str):
            return {**message, "content": [_text(content)]} if as_list else message
        return message if as_list else {**message, "content": self._flat(message)}

    def _flat(self, message: Message) -> str:
        texts = (
            (self.image_token or "") if p["type"] in _PICTURES else p.get("text", "")
            for p in message["content"]
        )
        return "".join(texts)

    def _role_reads_lists(self, role: str) -> bool:
        if role not in self._reads_lists:
            self._reads_lists[role] = True  # while the others of the small conversation are spelled
            prefer = self.takes_pictures
            shown = [s for s in (prefer, not prefer) if self._shows(role, s)]
            self._reads_lists[role] = shown[0] if shown else prefer
        return self._reads_lists[role]

    def _shows(self, role: str, as_list: bool) -> bool:
        """Whether contents of that spelling come out as their bare text in messages of a role."""
        content: Any = [_text(PROBE)] if as_list else PROBE
        message: Any = {"role": role, "content": content}
        user = _message("user", "a")
        if role == "tool":
            call = {"id": "call00000", "type": "function"}
            call["function"] = {"name": "f", "arguments": {}}  # type: ignore[assignment]
            asking = {**_message("assistant", "a"), "tool_calls": [call]}
            message |= {"tool_call_id": "call00000", "name": "f"}
            messages = [user, asking, message]
        elif role == "assistant":
            messages = [user, message]
        elif role == "user":
            messages = [message]
        else:
            messages = [message, user]
        try:
            others = [m if m is message else self._spell(m) for m in messages]
            text = self._render(others, None, False)
        except Exception:
            return False
        return PROBE in text and not re.search(r"""['"]type['"]""", text)


@lru_cache(maxsize=4)
def _renderer(processor: Any, template: Any) -> Renderer:
    return Renderer(processor)


def renderer_of(processor: Any) -> Renderer:
    """The renderer of a processor or tokenizer, with what was found out about its template."""
    return _renderer(processor, str(processor.chat_template))


def texts_of(message: Message) -> list[str]:
    """The texts of a message, neighbours joined as templates join them."""
    if isinstance(message["content"], str):
        return [message["content"]]
    runs = [""]
    for part in message["content"]:
        if part["type"] == "text":
            runs[-1] += part.get("text", "")
        else:
            runs.append("")
    return [run for run in runs if run]


def pictures_of(messages: Conversation) -> list[Any]:
    """The pictures of a conversation, in order: PIL, or what else ``transformers`` can fetch."""
    return [
        _picture(part)
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] in _PICTURES
    ]


def _picture(part: Any) -> Any:
    given = next((part[k] for k in (*_PICTURES, "url", "path", "base64") if k in part), None)
    return given.get("url") if isinstance(given, dict) else given


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": [_text(text)]}


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _arguments_as_text(message: Any) -> Any:
    """The message with the arguments of its tool calls as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    spelled = []
    for call in calls:
        function = call.get("function", {})
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        spelled.append({**call, "function": function})
    return {**message, "tool_calls": spelled}


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
