"""From messages as a file has them to a conversation as chat templates take it."""

import json
from typing import Any

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations.layouts import RawConversation
from dspark.schemas.conversations import Conversation, Message, Part

ROLES = ("system", "user", "assistant", "tool")
_PICTURE_KEYS = ("image", "image_url", "url", "path", "bytes", "base64")
_TEXT_KEYS = ("reasoning_content", "tool_call_id", "name")


class Hole:
    """An image part whose picture lies beside the messages.

    Attributes:
        index: which picture, or None for the next one.
    """

    def __init__(self, index: int | None) -> None:
        self.index = index


def canonical_messages(raw: RawConversation) -> Conversation:
    """Messages whose ``image`` is a ``Hole`` or a picture as the file has it.

    Raises:
        BadRowError: a field is missing or of a wrong kind, or nothing was written by the assistant.
    """
    messages = [_message(m, f"messages[{i}]") for i, m in enumerate(raw.messages)]
    if not any(m["role"] == "assistant" for m in messages):
        raise BadRowError("no assistant turn")
    for message in messages:
        if message["role"] == "assistant" and not _says_something(message):
            raise BadRowError("empty assistant turn")
    return messages


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A row's tools, given as a list or as its JSON.

    Raises:
        BadRowError: they are neither.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadRowError("broken tools", str(error)) from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError("broken tools", "not a list of objects")
    return tools


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadRowError("wrong field", f"{where} is no object")
    role = message.get("role")
    if role is None:
        raise BadRowError("missing field", f"{where}.role")
    if role not in ROLES:
        raise BadRowError("unknown role", repr(role))
    calls = _tool_calls(message.get("tool_calls"), where)
    content = message.get("content")
    if content is None and not (calls or message.get("reasoning_content")):
        raise BadRowError("missing field", f"{where}.content")
    out: Message = {"role": role, "content": _parts(content, f"{where}.content")}
    if calls:
        out["tool_calls"] = calls
    for key in _TEXT_KEYS:
        if (value := message.get(key)) is not None:
            out[key] = _text(value, f"{where}.{key}")  # type: ignore[literal-required]
    return out


def _parts(content: Any, where: str) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": _text(content, where)}]
    if not isinstance(content, list):
        raise BadRowError("wrong field", f"{where} is neither text nor a list of parts")
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": _text(part, where)}
    if not isinstance(part, dict):
        raise BadRowError("wrong field", f"{where} is no part")
    kind = part.get("type")
    if kind is None:
        kind = "text" if "text" in part else next((k for k in _PICTURE_KEYS if k in part), None)
        kind = "image" if kind in _PICTURE_KEYS else kind
    if kind == "text":
        if part.get("text") is None:
            raise BadRowError("missing field", f"{where}.text")
        return {"type": "text", "text": _text(part["text"], f"{where}.text")}
    if kind in ("image", "image_url"):
        return {"type": "image", "image": _picture(part)}
    if isinstance(kind, str) and any(word in kind for word in ("video", "audio")):
        raise BadRowError("video or audio", f"{where} is of type {kind!r}")
    raise BadRowError("unknown content part", f"{where} is of type {kind!r}")


def _picture(part: dict[str, Any]) -> Any:
    """The picture that a part carries, as the file has it, or a hole."""
    value = next((part[k] for k in _PICTURE_KEYS if part.get(k) is not None), None)
    if value is None:
        index = part.get("index")
        return Hole(index if isinstance(index, int) else None)
    if value is part.get("base64"):
        return {"base64": value}
    if value is part.get("image_url") and isinstance(value, dict):
        return value.get("url")
    if value is part.get("bytes") or value is part.get("path"):
        return {"bytes": part.get("bytes"), "path": part.get("path")}
    return value


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with ``arguments`` as a mapping, which is what chat templates expect."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRowError("broken tool call", f"{where}.tool_calls is no list")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRowError("broken tool call", f"{where} has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    outer = {k: v for k, v in call.items() if k not in ("function", "name", "arguments")}
    return {
        **outer,
        "type": "function",
        "function": {**function, "arguments": {} if arguments is None else arguments},
    }


def _says_something(message: Message) -> bool:
    texts = [part.get("text", "") for part in message["content"]]
    return bool(
        any(text.strip() for text in texts)
        or message.get("tool_calls")
        or message.get("reasoning_content", "").strip()
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRowError("wrong field", f"{where} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRowError("broken Unicode", f"{where} holds half of a surrogate pair") from None
    return value
