"""The text format, against protobuf's own parser."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.caffe.message import CaffeError, Message, Word
from firecaffe.caffe.text import MAX_DEPTH, MAX_VALUES, decoded, parse, read
from tests.kit.models_refused import refused

MEMBERS = ("MAX", "AVE", "true_story", "f")


def schema() -> Any:
    """A message with a repeated field of each kind: i, d, b, s, e, and itself as m."""
    kinds = descriptor_pb2.FieldDescriptorProto
    types = "TYPE_INT64 TYPE_DOUBLE TYPE_BOOL TYPE_STRING TYPE_ENUM TYPE_MESSAGE".split()
    names_of_types = {"e": ".t.E", "m": ".t.M"}
    file = descriptor_pb2.FileDescriptorProto(name="any.proto", package="t")
    enum, message = file.enum_type.add(name="E"), file.message_type.add(name="M")
    for number, name in enumerate(MEMBERS):
        enum.value.add(name=name, number=number)
    for number, (name, kind) in enumerate(zip("idbsem", types, strict=True), start=1):
        field = message.field.add(name=name, number=number, type_name=names_of_types.get(name))
        field.type, field.label = getattr(kinds, kind), kinds.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.M"))


M = schema()
Plain = dict[str, list[Any]]


def of_protobuf(message: Any) -> Plain:
    """What protobuf has understood."""
    plain: Plain = {field.name: [*values] for field, values in message.ListFields()}
    plain |= {"d": list(map(str, plain.get("d", []))), "m": list(map(of_protobuf, message.m))}
    plain["e"] = [MEMBERS[number] for number in message.e]
    return {name: values for name, values in plain.items() if values}


def of_ours(message: Message) -> Plain:
    """The same from ours, whose values are asked for as what they must be."""
    plain: Plain = {
        "i": message.integers("i"),
        "d": [
            str(float(each.value))
            for each in message.all("d")
            if isinstance(each.value, float | int)
        ],
        "b": [Message([each]).flag("b") for each in message.all("b")],
        "s": message.texts("s"),
        "e": message.choices("e", MEMBERS),
        "m": [of_ours(each) for each in message.messages("m")],
    }
    assert list(message.unread()) == []
    return {name: values for name, values in plain.items() if values}


def agrees(text: str) -> Plain:
    expected = of_protobuf(text_format.Parse(text, M()))
    assert of_ours(parse(text)) == expected
    return expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " # only a comment",
        "i: 1 i: -2 i: 0x1F i: 010 i: -0xA i: 9223372036854775807 i: -9223372036854775807",
        "d: 1 d: 1. d: .5 d: -2.5e-3 d: 1E5 d: 1e+2 d: 3.5f d: 1F d: 1e999 d: 7",
        "d: inf d: -inf d: nan d: -nan d: Infinity d: INF",
        "b: true b: false b: t b: f b: True b: False b: 1 b: 0",
        "e: MAX e: 1 e: true_story e: f",
        r"""s: "a'b" s: 'a"b' s: "" s: 'tab\tnew\n'
        s: 'quote\"bell\a\\' s: "\101\x41\1012" s: "\xe4\xbd\xa0" """,
        r's: "\u4f60\U0001F600"',
        "s: 'one' \"two\"\n 'three' s: 'four' # five\n 'six'",
        "s: '你好 😀'",
        's: "# no comment" s: "{ } < > : ;"',
        "m { i: 1 } m < i: 2 > m: { i: 3 } m: < > m{}m{m{m<m{i:4}>}}",
        "i: [1, 2, 3] i: 4 i: [] d: [1.5,-2] s: ['a' 'b', 'c'] e: [AVE, 0] m: [{i: 1}, <i: 2>]",
        "m [ { i: 1 }, { } ]",
        "i: 1; i: 2, i: 3; m { i: 4; }, m { i: 5, }; i: 6;",
        "i:1#comment\ni\n:\n2\r\ni: 3\ti:4\r\n\v\f",
    ],
)
def test_agrees_with_protobuf(text: str) -> None:
    agrees(text)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
MESSAGES = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "i": st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=3),
            "d": st.lists(st.floats(), max_size=3),
            "b": st.lists(st.booleans(), max_size=2),
            "s": st.lists(TEXTS, max_size=3),
            "e": st.lists(st.sampled_from(MEMBERS), max_size=2),
        },
    ),
    lambda inner: st.fixed_dictionaries({"m": st.lists(inner, max_size=3)}),
    max_leaves=8,
)


@settings(max_examples=60)
@given(MESSAGES, st.booleans(), st.booleans())
def test_agrees_with_what_protobuf_writes(values: Plain, one_line: bool, utf8: bool) -> None:
    message = M(**values)
    text = text_format.MessageToString(message, as_one_line=one_line, as_utf8=utf8)
    assert of_ours(parse(text)) == of_protobuf(message) == agrees(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("i 1", "1: found 1 after i; expected : or {"),
        ("\ni: \n", "3: found the end of the file after i:; expected a value"),
        ("m {\n i: 1\n", "3: found the end of the file; expected a name or }, which closes line 1"),
        ("m { i: 1 >", "1: found >; expected a name or }"),
        ("m { } }", "1: found }; expected a name"),
        ("\n\n: 1", "3: found :; expected a name"),
        ("i: 1,, i: 2", "1: found ,; expected a name"),
        ("; i: 1", "1: found ;; expected a name"),
        ("i: [1, ]", "1: found ] after i:; expected a value"),
        ("i: [1 2]", "1: found 2; expected , or ]"),
        ("i [1]", "1: found 1 after i; expected : or {"),
        ("i: - - 1", "1: found - after i:"),
        ("e: -MAX", "1: found MAX after e:"),
        ("i: +1", "1: found +1; expected name: value"),
        ("i: 5x", "1: found 5x; expected name: value"),
        ("i: 0x", "1: found 0x;"),
        ("i: 1.2.3", "1: found 1.2.3"),
        ("i: 1e", "1: found 1e"),
        ("i: 08", "1: 08 begins with 0 and is not octal"),
        ("i: 01.5", "1: 01.5 begins with 0"),
        ("i: 0x10000000000000000", "1: 0x10000000000000000 has more than 64 bits"),
        ("i: 02000000000000000000000", "1: 02000000000000000000000 has more than 64 bits"),
        ("i: " + "9" * 401, "1: a number of more than 400 signs"),
        ('\ns: "open', '2: found a string that does not end: "open'),
        ('s: "open\n"', '1: found a string that does not end: "open'),
        ('\ns: "C:\\data"', r"2: \d in a string is no character; a \ is written \\"),
        (r's: "\xg"', r"1: \x in a string"),
        (r's: "\u12"', r"1: \u in a string"),
        (r's: "\400"', r"1: \400 in a string"),
        (r's: "\ud800"', r"1: \ud800 in a string"),
        (r's: "\U00110000"', r"1: \U00110000 in a string"),
        ("\ns: '" + "x" * 19_999 + "'", "2: a string of more than 20,000 bytes"),
        ("s: ''\n" + "''" * 10_000, "2: a string of more than 20,000 bytes"),
        ("[ext.ension]: 1", "1: found [; expected a name"),
        ("m {" * (MAX_DEPTH + 1), f"1: messages are nested more than {MAX_DEPTH} deep"),
        ("\n" + "i:1 " * (MAX_VALUES + 1), f"2: more than {MAX_VALUES:,} values"),
        ("s: '%s'\n" % ("é" * 5_000) * 25 + "s: 'é'", "26: more than 250,000 bytes of strings"),
    ],
)
def test_what_is_no_text_of_this_format(text: str, words: str) -> None:
    with refused(CaffeError, [f"prototxt:{words}"]):
        parse(text)


def test_lines_are_those_of_the_names() -> None:
    message = parse('a: 1\r\n# comment\n\nb {\n c: "x"\n  "y" d:\n [1,\n 2]\n}\ne: -\n3\nf: 4')
    lines, inner = (
        [(each.name, each.line) for each in of.fields] for of in (message, message.message("b"))
    )
    assert lines == [("a", 1), ("b", 4), ("e", 10), ("f", 12)]
    assert inner == [("c", 5), ("d", 6), ("d", 6)]
    assert message.integer("e") == -3


def test_whole_numbers_beyond_64_bits_are_numbers_yet() -> None:
    message = parse("a: 18446744073709551616 b: " + "9" * 400)
    assert message.numbers("a") == [2.0**64]
    assert message.all("b")[0].value == float("inf")
    with pytest.raises(CaffeError, match="expected a whole number"):
        message.integer("a")


@pytest.mark.parametrize("value", ["nan", "-inf", "1e999"])
def test_numbers_that_are_not_finite_are_named(value: str) -> None:
    with refused(CaffeError, ["prototxt:2", "loss_weight", "finite"]):
        parse(f"\nloss_weight: {value}").numbers("loss_weight")


def test_files_as_they_are_found(tmp_path: Path) -> None:
    """With a byte order mark, lines of Windows, and comments in GBK, Latin-1 and UTF-8."""
    path = tmp_path / "net.prototxt"
    comments = ["卷积层".encode("gbk"), "Größe".encode("latin-1"), "层".encode()]
    lines = [b"# " + each + b'\r\nname: "a"' for each in comments]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([*lines, "s: '层'".encode(), b"t: '\xe9'"]))
    message = read(path)
    assert [each.line for each in message.all("name")] == [2, 4, 6]
    assert (message.text("s"), message.text("t")) == ("层", "é")


def test_bytes_that_are_no_utf8_stay_different_and_can_be_shown() -> None:
    found = [decoded(bytes([byte])) for byte in range(256)]
    assert len(set(found)) == 256
    assert "".join(found).encode()
    assert decoded("你 é".encode()) == "你 é"


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    for content, words in (
        (b"a: 1 \0", "byte 5 is no text; expected a prototxt"),
        ("a: 1".encode("utf-16"), "byte 3 is no text"),
    ):
        path.write_bytes(content)
        with pytest.raises(CaffeError, match=words):
            read(path)
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(CaffeError, match="16,777,217 bytes; expected a prototxt"):
        read(path)
    for missing in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(CaffeError, match="is no file"):
            read(missing)


def test_escapes_that_are_the_sign_itself() -> None:
    assert parse(r'''s: "\?\'\"\\"''').text("s") == "?'\"\\"


def test_words_are_no_strings() -> None:
    message = parse('a: MAX b: "MAX" c: true')
    assert isinstance(message.fields[0].value, Word)
    assert not isinstance(message.fields[1].value, Word)
    for name in ("a", "c"):
        with pytest.raises(CaffeError, match=":1: "):
            message.text(name)
    with pytest.raises(CaffeError, match="expected one of MAX, AVE"):
        message.choice("b", ("MAX", "AVE"), "MAX")


def test_an_error_is_one_line_whatever_the_value() -> None:
    with refused(CaffeError, [r'prototxt:1: a is "one\ntwo\x1b[31m\u2028"; expected a whole']):
        parse(r'a: "one\ntwo\x1b[31m\u2028"').integer("a")
