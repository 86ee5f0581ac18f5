"""Keys come from one place and appear in no message; addresses hold none."""

import pytest

from areax.rollout.processes import keys


def test_a_key_comes_from_the_environment_or_a_file(tmp_path, monkeypatch):
    read = lambda: keys.read("THE_KEY")
    file = tmp_path / "key"
    assert read() is None
    monkeypatch.setenv("THE_KEY", " a secret\n")
    assert read() == "a secret"
    monkeypatch.setenv("THE_KEY_FILE", str(file))
    with pytest.raises(ValueError, match="^THE_KEY: .* from one place, got THE_KEY_FILE as well"):
        read()
    monkeypatch.delenv("THE_KEY")
    with pytest.raises(
        ValueError, match="^THE_KEY_FILE: must name a readable file with the key .No such file"
    ) as error:
        read()
    assert str(file) not in str(error.value)  # perhaps the key, given in the wrong place
    file.write_text("another\n")
    assert read() == "another"
    for data in (b"", b" \n", "schl\u00fcssel".encode(), b"two\nlines", b"\xff"):
        file.write_bytes(data)
        with pytest.raises(ValueError, match="^THE_KEY_FILE: ") as error:
            read()
        assert "\n" not in str(error.value) and "two" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://ann:hush@host:1", "http://***@host:1"),
        ("http://hush@host:1/path", "http://***@host:1/path"),
        ("http://a:hu@sh@host", "http://***@host"),
        ("http://a:hu#s?h@host", "http://***@host"),
        ("ann:hush@host", "***@host"),
        ("math=http://ann:hu=sh@host", "math=http://***@host"),
        ("http://host:1?token=hush", "http://host:1?***"),
        ("http://host:1/#hush", "http://host:1/?***"),
    ],
)
def test_addresses_with_secrets_are_refused_without_showing_them(url, shown):
    with pytest.raises(ValueError, match="^--servers: an address must have no user, password or query") as error:
        keys.check_address(url, "--servers")
    assert f"got {shown};" in str(error.value)
    keys.check_address("http://host:1/path", "--servers")
