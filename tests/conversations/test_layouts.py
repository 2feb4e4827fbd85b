"""Each layout by hand: what a file says, and the messages that a chat template gets."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversation_data import png
from PIL import Image

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations import open_conversations
from dspark.schemas.errors import InputError

COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 128, 0)}
NAMES = {colour: name for name, colour in COLOURS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``red.png``, ``blue.png`` and ``green.png``."""
    for name, colour in COLOURS.items():
        (tmp_path / f"{name}.png").write_bytes(png(Image.new("RGB", (2, 2), colour)))
    return tmp_path


def readable(messages: list[Any]) -> list[tuple[Any, ...]]:
    """Messages with a picture as the name of its colour in angle brackets; other keys behind."""
    out = []
    for message in messages:
        parts = [
            p["text"] if p["type"] == "text" else f"<{NAMES[p['image'].getpixel((0, 0))]}>"
            for p in message["content"]
        ]
        extra = {k: v for k, v in message.items() if k not in ("role", "content")}
        out.append((message["role"], parts, extra) if extra else (message["role"], parts))
    return out


def read(folder: Path, *rows: Any) -> list[Any]:
    """Every row, read from JSON Lines; a bad row as its reason."""
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations = open_conversations(path)
    out: list[Any] = []
    for i in range(len(conversations)):
        try:
            out.append(readable(conversations.read(i).messages))
        except BadRowError as error:
            out.append(str(error))
    return out


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
PLAIN = [("user", ["Hi"]), ("assistant", ["Yes."])]


@pytest.mark.parametrize("column", ["messages", "conversation", "conversations"])
def test_openai_style(folder: Path, column: str) -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": "red.png"},
        {"type": "image_url", "image_url": {"url": "blue.png"}},
        {"type": "image_url", "image_url": "green.png"},
        {"type": "image", "url": "red.png"},
        {"type": "image", "path": "blue.png"},
        {"text": "b"},
        {"image": "green.png"},
        {"image_url": {"url": "red.png"}},
        "c",
    ]
    assert read(
        folder,
        {column: [USER, ASSISTANT]},
        {column: [{"role": "user", "content": parts}, ASSISTANT]},
        {column: [{"role": "user", "content": "<image> means x"}, ASSISTANT]},
    ) == [
        PLAIN,
        [
            (
                "user",
                ["a", "<red>", "<blue>", "<green>", "<red>", "<blue>", "b", "<green>", "<red>"]
                + ["c"],
            ),
            ("assistant", ["Yes."]),
        ],
        [("user", ["<image> means x"]), ("assistant", ["Yes."])],
    ]


def test_pictures_beside_openai_messages(folder: Path) -> None:
    image, text = {"type": "image"}, {"type": "text", "text": "<image>"}

    def user(content: Any) -> list[Any]:
        return [{"role": "user", "content": content}, ASSISTANT]

    assert read(
        folder,
        {"messages": user([image, text, image]), "images": ["red.png", "blue.png"]},
        {"messages": user([{**image, "index": 1}, {**image, "index": 0}]), "images": ["red.png"]},
        {
            "messages": user([{**image, "index": 1}, {**image, "index": 0}]),
            "images": ["red.png", "blue.png"],
        },
        {"messages": [*user("<image>a"), *user("b<image>")], "images": ["red.png", "blue.png"]},
        {"messages": user([image]), "image": "green.png"},
        {"messages": user("no placeholder"), "images": ["red.png"]},
        {"messages": user([image]), "images": None},
        {"messages": user([image]), "images": ["red.png", "blue.png"]},
        {"messages": user([image, {"type": "image", "image": "red.png"}]), "images": ["blue.png"]},
    ) == [
        [("user", ["<red>", "<image>", "<blue>"]), ("assistant", ["Yes."])],
        "pictures and placeholders do not match: 1 pictures, 2 image parts",
        [("user", ["<blue>", "<red>"]), ("assistant", ["Yes."])],
        [
            ("user", ["<red>", "a"]),
            ("assistant", ["Yes."]),
            ("user", ["b", "<blue>"]),
            ("assistant", ["Yes."]),
        ],
        [("user", ["<green>"]), ("assistant", ["Yes."])],
        "pictures and placeholders do not match: 1 pictures, 0 times <image>",
        "pictures and placeholders do not match: 0 pictures, 1 image parts",
        "pictures and placeholders do not match: 2 pictures, 1 image parts",
        [("user", ["<blue>", "<red>"]), ("assistant", ["Yes."])],
    ]


def test_sharegpt_and_llava(folder: Path) -> None:
    def turns(*values: str) -> list[dict[str, str]]:
        return [
            {"from": "gpt" if i % 2 else "human", "value": value} for i, value in enumerate(values)
        ]

    assert read(
        folder,
        {"conversations": turns("<image>\nWhat is it?", "A cat."), "image": "red.png"},
        {"conversations": turns("What is it?\n<image>", "A <image>."), "images": ["blue.png"]},
        {
            "conversations": turns("<image><image>\nDiffer?", "Yes.", "And <image> here?", "No."),
            "images": ["red.png", "blue.png", "green.png"],
        },
        {"conversations": turns("Hi", "Yes."), "image": None},
        {"conversations": turns("Hi", "Yes."), "system": "Be brief."},
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "user", "value": "Hi"},
                {"from": "assistant", "value": "Calling."},
                {"from": "observation", "value": "42"},
                {"from": "model", "value": "It is 42."},
            ]
        },
        {"conversations": turns("<image> or <image>?", "One."), "image": "red.png"},
        {"conversations": turns("<image>?", "None.")},
        {"conversations": turns("No mark?", "None."), "image": "red.png"},
        {"conversations": [{"from": "narrator", "value": "x"}]},
        {"conversations": [{"from": "human"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"value": "x"}]},
    ) == [
        [("user", ["<red>", "What is it?"]), ("assistant", ["A cat."])],
        [("user", ["What is it?", "<blue>"]), ("assistant", ["A <image>."])],
        [
            ("user", ["<red>", "<blue>", "Differ?"]),
            ("assistant", ["Yes."]),
            ("user", ["And ", "<green>", " here?"]),
            ("assistant", ["No."]),
        ],
        PLAIN,
        [("system", ["Be brief."]), *PLAIN],
        [
            ("system", ["S"]),
            ("user", ["Hi"]),
            ("assistant", ["Calling."]),
            ("tool", ["42"]),
            ("assistant", ["It is 42."]),
        ],
        "pictures and placeholders do not match: 1 pictures, 2 times <image>",
        "pictures and placeholders do not match: 0 pictures, 1 times <image>",
        "pictures and placeholders do not match: 1 pictures, 0 times <image>",
        "unknown role: 'narrator'",
        "missing field: conversations[0].value",
        "missing field: conversations[1].from",
    ]


def test_images_and_texts(folder: Path) -> None:
    texts = [{"user": "Hi", "assistant": "Yes.", "source": "x"}, {"user": "So?", "assistant": "No"}]
    rest = [("assistant", ["Yes."]), ("user", ["So?"]), ("assistant", ["No"])]
    assert read(
        folder,
        {"texts": texts, "images": ["red.png", "blue.png"]},
        {"texts": texts, "images": []},
        {"texts": [{"user": "Hi"}], "images": []},
    ) == [
        [("user", ["<red>", "<blue>", "Hi"]), *rest],
        [("user", ["Hi"]), *rest],
        "missing field: texts[0].assistant",
    ]


def test_prompt_and_completion(folder: Path) -> None:
    system = {"role": "system", "content": "S"}
    marked = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}
    assert read(
        folder,
        {"prompt": "Hi", "completion": "Yes."},
        {"prompt": [system, USER], "completion": [ASSISTANT], "images": ["red.png", "blue.png"]},
        {"prompt": [marked], "completion": [ASSISTANT], "images": ["red.png"]},
        {"prompt": "Hi", "completion": None},
        {"prompt": [system], "completion": [ASSISTANT], "images": ["red.png"]},
    ) == [
        PLAIN,
        [("system", ["S"]), ("user", ["<red>", "<blue>", "Hi"]), ("assistant", ["Yes."])],
        [("user", ["Hi", "<red>"]), ("assistant", ["Yes."])],
        "missing field: completion",
        "pictures and placeholders do not match: 1 pictures, no user turn",
    ]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_and_reasoning(folder: Path) -> None:
    messages = [
        {**USER, "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "add"},
        {**ASSISTANT, "reasoning_content": "Hm.", "tool_calls": None, "weight": 1},
    ]
    expected = [
        ("user", ["Hi"], {"name": "Ann"}),
        (
            "assistant",
            [],
            {
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": {"a": 1}},
                    }
                ]
            },
        ),
        ("tool", ["1"], {"tool_call_id": "c1", "name": "add"}),
        ("assistant", ["Yes."], {"reasoning_content": "Hm."}),
    ]
    assert read(folder, {"messages": messages, "tools": [TOOL]}) == [expected]
    assert open_conversations(folder / "d.jsonl").read(0).tools == [TOOL]
    # The same from Parquet, where every part and every tool has the same fields, many of them null.
    other = {"type": "function", "function": {"name": "sub", "strict": True}}
    pq.write_table(
        pa.Table.from_pylist([{"messages": messages, "tools": [TOOL, other]}]), folder / "d.parquet"
    )
    row = open_conversations(folder / "d.parquet").read(0)
    assert readable(row.messages) == expected
    assert row.tools == [TOOL, other]
    read(folder, {"messages": messages, "tools": json.dumps([TOOL])})
    assert open_conversations(folder / "d.jsonl").read(0).tools == [TOOL]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "missing field: messages"),
        ("Hi", "wrong field: messages is no list"),
        ([], "no assistant turn"),
        ([USER], "no assistant turn"),
        ([USER, "x"], "wrong field: messages[1] is no object"),
        ([{"content": "Hi"}, ASSISTANT], "missing field: messages[0].role"),
        ([{"role": "user"}, ASSISTANT], "missing field: messages[0].content"),
        ([{"role": "user", "content": None}, ASSISTANT], "missing field: messages[0].content"),
        (
            [{"role": "user", "content": 7}, ASSISTANT],
            "wrong field: messages[0].content is neither text nor a list of parts",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}, ASSISTANT],
            "missing field: messages[0].content[0].text",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 7}]}, ASSISTANT],
            "wrong field: messages[0].content[0].text is no text",
        ),
        ([{"role": "robot", "content": "Hi"}, ASSISTANT], "unknown role: 'robot'"),
        ([{"role": ["user"], "content": "Hi"}, ASSISTANT], "unknown role: ['user']"),
        ([USER, {"role": "assistant", "content": ""}], "empty assistant turn"),
        ([USER, ASSISTANT, {"role": "assistant", "content": []}], "empty assistant turn"),
        ([USER, {"role": "assistant", "content": " \n"}], "empty assistant turn"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, ASSISTANT],
            "video or audio: messages[0].content[0] is of type 'video'",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}, ASSISTANT],
            "video or audio: messages[0].content[0] is of type 'input_audio'",
        ),
        (
            [{"role": "user", "content": [{"type": "table"}]}, ASSISTANT],
            "unknown content part: messages[0].content[0] is of type 'table'",
        ),
        (
            [USER, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
            "broken tool call: messages[1].tool_calls[0] has no function name",
        ),
        ([{"role": "user", "content": "\ud800"}, ASSISTANT], "broken Unicode: messages[0].content"),
    ],
)
def test_bad_messages(folder: Path, messages: Any, reason: str) -> None:
    good = {"messages": [USER, ASSISTANT]}
    assert read(folder, good, {"messages": messages})[1].startswith(reason)
    assert read(folder, {"messages": messages}, good)[1] == PLAIN  # a bad first row hides nothing


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"video": "a.mp4"}, "video or audio: the row has video"),
        ({"audios": ["a.wav"]}, "video or audio: the row has audios"),
        ({"tools": "[{"}, "broken tools: "),
        ({"tools": ["add"]}, "broken tools: not a list of objects"),
    ],
)
def test_bad_columns(folder: Path, extra: dict[str, Any], reason: str) -> None:
    assert read(folder, {"messages": [USER, ASSISTANT], **extra})[0].startswith(reason)


def test_every_file_of_a_folder_has_its_own_layout(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 7, "messages": [USER, ASSISTANT]}) + "\n")
    (tmp_path / "b.jsonl").write_text("\n")
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]
    (tmp_path / "c.json").write_text(json.dumps([{"conversations": sharegpt, "id": "x"}]))
    conversations = open_conversations(tmp_path)
    assert conversations.layout == "messages of {role, content}; conversations of {from, value}"
    assert [readable(conversations.read(i).messages) for i in range(2)] == [PLAIN, PLAIN]
    assert [conversations.id(i) for i in range(2)] == ["7", "x"]
    assert conversations.where(1) == f"row 1 (row 0 of {tmp_path / 'c.json'})"
    whole = conversations.fingerprint()
    (tmp_path / "b.jsonl").rename(tmp_path / "d.jsonl")  # no rows, but another order
    assert open_conversations(tmp_path).fingerprint() != whole


def test_unknown_layouts_name_what_is_there_and_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"dialogue": [{"who": "a", "what": "b"}], "id": 1}) + "\n")
    with pytest.raises(InputError) as error:
        open_conversations(path)
    assert "its columns are dialogue (of who, what), id; known layouts are" in str(error.value)
    for known in ("{role, content}", "{from, value}", "texts", "prompt and completion"):
        assert known in str(error.value)
    path.write_text(json.dumps({"messages": [{"who": "a", "what": "b"}]}) + "\n")
    with pytest.raises(InputError, match=r"its columns are messages \(of who, what\)"):
        open_conversations(path)
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="its columns are question; known"):
        open_conversations(tmp_path / "d.parquet")
    path.write_text("{oops\n" * 5)
    with pytest.raises(InputError, match="none of its first 64 rows can be read"):
        open_conversations(path)


def test_the_examples_of_the_documentation(folder: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    examples = [block.split("```")[0] for block in text.split("```json\n")[1:]]
    assert len(examples) == 5
    (folder / "cat.png").write_bytes((folder / "red.png").read_bytes())
    blue = base64.b64encode((folder / "blue.png").read_bytes()).decode()
    rows = [json.loads(e.replace("base64,…", f"base64,{blue}")) for e in examples]
    question = [("user", ["<red>", "What is it?"]), ("assistant", ["A cat."])]
    found = []
    for row in rows:  # each in a file of its own, for the layouts differ
        found += read(folder, row)
    assert found == [
        [
            ("system", ["Be brief."]),
            ("user", ["<red>", "<blue>", "Differ?"]),
            ("assistant", ["Yes."]),
        ],
        [("user", ["<red>", "What?"]), ("assistant", ["A cat."])],
        question,
        question,
        question,
    ]
