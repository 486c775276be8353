"""Addresses, rates, sizes, spans of time and of the day, as users write them."""

from __future__ import annotations

import pytest

from nolocod.errors import UsageError
from nolocod.units import SLOWEST_RATE, Address, Hours, parse_line, parse_name, parse_rate, parse_size, parse_span


def test_a_name_is_up_to_32_signs_that_are_safe_to_show() -> None:
    for text in ("", "A", "Žofie's GPU (2)", "x" * 32, "a.b+c@d-e"):
        assert parse_name(text, "--name") == text
    for text in (" a", "a ", "x" * 33, "<b>", "a\nb", "a\x1b[1m", "a&b", '"', "a\u202eb", "a\u200bb"):
        with pytest.raises(UsageError, match="--name"):
            parse_name(text, "--name")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:65535", "::1", 65_535), ("localhost:80", "localhost", 80)],
)
def test_addresses_read_and_write_the_same(text: str, host: str, port: int) -> None:
    address = Address.parse(text, "--http")
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "localhost", ":80", "localhost:", "localhost:http", "localhost:65536", "localhost:-1", "localhost:²"]
)
def test_a_wrong_address_names_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--listen") as caught:
        Address.parse(text, "--listen")
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20Mbit", 2_500_000),
        ("20 mbit", 2_500_000),
        ("20Mbit/s", 2_500_000),
        ("20Mbps", 2_500_000),
        ("2.5MB", 2_500_000),
        ("2.5MB/s", 2_500_000),
        ("256kbit", SLOWEST_RATE),
        ("1Gbit", 125_000_000),
        ("1MiB", 1 << 20),
        ("300000B", 300_000),
        ("1000000bit", 125_000),
    ],
)
def test_rates_tell_bits_from_bytes(text: str, rate: int) -> None:
    assert parse_rate(text, "--max-upload") == rate


@pytest.mark.parametrize(
    "text", ["", "20", "Mbit", "20M", "20Mb", "20mb", "-1MB", "1e3MB", "nanMB", "infMB", "20MB/min", "1,5MB", "²MB", "20Qbit"]
)
def test_a_rate_that_is_none_names_its_flag_and_shows_how(text: str) -> None:
    with pytest.raises(UsageError, match="--max-upload") as caught:
        parse_rate(text, "--max-upload")
    assert "20Mbit or 2.5MB" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("100/20Mbit", (12_500_000, 2_500_000)),
        ("1Gbit/20Mbit", (125_000_000, 2_500_000)),
        ("100 / 20 Mbit/s", (12_500_000, 2_500_000)),
        ("2.5MB", (2_500_000, 2_500_000)),
        ("20Mbit/s", (2_500_000, 2_500_000)),
    ],
)
def test_lines_have_two_rates_or_one(text: str, line: tuple[int, int]) -> None:
    assert parse_line(text, "--line") == line


@pytest.mark.parametrize("text", ["", "/", "100/20", "100/", "/20Mbit", "100Mbit/20", "100/20/5Mbit", "100/fast"])
def test_a_line_that_is_none_names_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--line"):
        parse_line(text, "--line")


@pytest.mark.parametrize("text", ["0MB", "255kbit", "1bit"])
def test_a_rate_too_slow_for_a_chunk_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="too slow") as caught:
        parse_rate(text, "--max-download")
    assert "256kbit" in caught.value.remedy


@pytest.mark.parametrize(("text", "size"), [("200GB", 200 * 10**9), ("1.5TB", 15 * 10**11), ("1GiB", 1 << 30), ("5 kB", 5000)])
def test_sizes_are_bytes(text: str, size: int) -> None:
    assert parse_size(text, "--monthly-budget") == size


@pytest.mark.parametrize("text", ["", "200", "200Gbit", "200Gb", "0GB", "0.1B", "-5GB"])
def test_a_size_that_is_none_names_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--monthly-budget"):
        parse_size(text, "--monthly-budget")


@pytest.mark.parametrize("text", ["22:00-07:00", "00:00-24:00", "09:30-17:45"])
def test_hours_read_and_write_the_same(text: str) -> None:
    assert str(Hours.parse(text, "--hours")) == text


@pytest.mark.parametrize(("text", "open_minutes"), [("22:00-07:00", 540), ("00:00-24:00", 1440), ("09:30-17:45", 495)])
def test_hours_are_as_long_as_they_look(text: str, open_minutes: int) -> None:
    assert sum(map(Hours.parse(text, "--hours").contains, range(1440))) == open_minutes


@pytest.mark.parametrize(
    "text", ["", "22-7", "22:00", "24:00-07:00", "22:60-07:00", "08:00-08:00", "22:00-25:00", "8:00 - 9:00"]
)
def test_hours_that_are_none_name_their_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--hours"):
        Hours.parse(text, "--hours")


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("12h", 43_200), (" 30d", 2_592_000), ("2w", 1_209_600)])
def test_spans(text: str, seconds: float) -> None:
    assert parse_span(text, "--expires") == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "0d", "-1d", "1.5d", "30 d", "30D", "999999d"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(UsageError, match="--expires"):
        parse_span(text, "--expires")
