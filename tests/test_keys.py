"""Keys: files that are refused with a remedy, an allow-list that is read anew, and `asynckv keygen`."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

import asynckv
from asynckv import ConfigError, Engine, EngineConfig, KeysConfig
from asynckv.edges.control.zmq import ZmqPlane, make_pair
from asynckv.keys import AllowList, KeyPair, decode_z85, encode_z85, read_pair, read_public, write_pair
from asynckv.layout import register_memory
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import PRESETS
from tests.commands import Command

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def keys(tmp_path: Path) -> KeysConfig:
    """One engine's keys, in a directory that authorizes it and one other."""
    directory = tmp_path / "keys"
    secret, _ = write_pair(directory, "mine", make_pair())
    write_pair(directory, "theirs", make_pair())
    return KeysConfig(secret=secret, authorized=directory)


def refusal(keys: KeysConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        ZmqPlane(LOOPBACK, keys=keys)
    return str(caught.value)


# -- the format ------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32))
def test_keys_are_written_as_zmq_writes_them(key: bytes) -> None:
    assert encode_z85(key).encode() == z85.encode(key)
    assert decode_z85(z85.encode(key)) == key


@given(st.binary(max_size=60) | st.text("0123456789.-:+=^!/*?&<>()[]{}@%$#~", max_size=45).map(str.encode))
def test_what_is_no_key_is_never_taken_for_one(text: bytes) -> None:
    try:
        assert z85.encode(decode_z85(text)) == text
    except ValueError as exc:
        assert "not a key" in str(exc)  # noqa: PT017 - both outcomes are good


def test_zmq_reads_our_files_and_we_read_zmqs(tmp_path: Path) -> None:
    pair = make_pair()
    secret, public = write_pair(tmp_path, "ours", pair)
    assert zmq.auth.load_certificate(secret) == (z85.encode(pair.public), z85.encode(pair.secret))
    assert zmq.auth.load_certificate(public) == (z85.encode(pair.public), None)
    made_public, made_secret = zmq.auth.create_certificates(tmp_path, "theirs")
    os.chmod(made_secret, 0o600)
    found = read_pair(Path(made_secret))
    assert found.public == read_public(Path(made_public))
    assert zmq.curve_public(z85.encode(found.secret)) == z85.encode(found.public)


def test_no_secret_is_ever_printed() -> None:
    pair = make_pair()
    assert encode_z85(pair.secret) not in repr(pair)
    assert repr(pair.secret) not in repr(pair)


# -- bad configuration -----------------------------------------------------------------------------


def test_keys_and_allow_insecure_contradict_each_other(keys: KeysConfig) -> None:
    with pytest.raises(ConfigError, match="remove allow_insecure"):
        EngineConfig(engine_id="x", keys=keys, allow_insecure=True)
    assert asynckv.KeysConfig is KeysConfig


@pytest.mark.parametrize("path", ["", None, 7])
def test_paths_that_are_none_are_named(path: object) -> None:
    with pytest.raises(ConfigError, match=r"keys.secret is .*asynckv keygen"):
        KeysConfig(secret=path, authorized="keys")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"keys.authorized is"):
        KeysConfig(secret="keys/x.key_secret", authorized=path)  # type: ignore[arg-type]


def test_an_engine_with_bad_keys_is_never_made(tmp_path: Path) -> None:
    layout = model_layout(PRESETS["llama-3.1-8b"].resized(layers=1), num_blocks=4)
    keys = KeysConfig(secret=tmp_path / "none", authorized=tmp_path)
    with pytest.raises(ConfigError, match="asynckv keygen"):
        Engine(EngineConfig(engine_id="x", keys=keys), register_memory(layout))


def test_an_address_of_ones_own_carries_no_key(keys: KeysConfig) -> None:
    key = "#" + "0" * 64
    with pytest.raises(ConfigError, match=r"bind .* carries a key"):
        ZmqPlane(LOOPBACK + key, keys=keys)
    with pytest.raises(ConfigError, match=r"advertise .* carries a key"):
        ZmqPlane(LOOPBACK, "tcp://10.0.0.1:5" + key)


def test_keys_allow_any_address_to_listen_at(keys: KeysConfig) -> None:
    with pytest.raises(ConfigError, match="asynckv keygen"):
        ZmqPlane("tcp://10.0.0.1:0")
    assert ZmqPlane("tcp://10.0.0.1:0", keys=keys).address == ""


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file or directory; make one with asynckv keygen"),
        (lambda path: path.write_text("curve\n"), "holds no public key"),
        (lambda path: path.write_bytes(b"\xff" * 99), "holds no public key"),
        (lambda path: path.write_text('secret-key = "short"'), "its secret key is not a key of 40"),
        (lambda path: path.write_text(f'public-key = "{"~" * 40}"'), "its public key is not a key of 40"),
        (lambda path: path.write_text(f'public-key = "{"#" * 40}"'), "its public key is not a key of 40"),
        (lambda path: path.write_bytes(path.with_name("mine.key").read_bytes()), "holds no secret key; give the file"),
        (lambda path: path.write_bytes(path.read_bytes() + path.with_name("theirs.key").read_bytes()), "two public"),
        (lambda path: path.write_bytes(path.read_bytes() + bytes(1 << 17)), "longer than 64 KiB"),
        (lambda path: path.chmod(0o640), "mode 0640, .* chmod 600 .*mine.key_secret"),
        (lambda path: path.chmod(0o604), "mode 0604"),
    ],
)
def test_a_key_file_that_cannot_serve_is_refused_with_the_remedy(keys: KeysConfig, spoil: object, says: str) -> None:
    assert callable(spoil)
    spoil(Path(keys.secret))
    text = refusal(keys)
    assert "mine.key_secret" in text
    assert re.search(says, text), text
    assert "\n" not in text


def test_a_pipe_a_directory_and_a_null_byte_are_no_key_files(keys: KeysConfig, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null"), Path("a\0b")):
        text = refusal(KeysConfig(secret=path, authorized=keys.authorized))
        assert "not a regular file" in text or "cannot be read" in text
        assert "asynckv keygen" in text


def test_two_keys_that_do_not_belong_together_are_refused(keys: KeysConfig, tmp_path: Path) -> None:
    secret, _ = write_pair(tmp_path, "mixed", KeyPair(make_pair().public, make_pair().secret))
    assert "do not belong together" in refusal(KeysConfig(secret=secret, authorized=keys.authorized))


def test_an_allow_list_that_is_missing_or_empty_is_refused_with_the_remedy(keys: KeysConfig, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, says in (("none", "No such file"), ("empty", "has no *.key file"), ("a\0b", "null")):
        text = refusal(KeysConfig(secret=keys.secret, authorized=tmp_path / name))
        assert says in text
    assert "Not a directory" in refusal(KeysConfig(secret=keys.secret, authorized=keys.secret))


@pytest.mark.slow
def test_a_directory_that_everybody_may_write_is_an_allow_list_where_it_is_mounted_read_only(keys: KeysConfig) -> None:
    """As a ConfigMap is, with mode 0777."""
    Path(keys.authorized).chmod(0o777)
    assert "run chmod o-w" in refusal(keys)
    script = f'cd {keys.authorized} && mount --bind . . && cd "$PWD" && mount -o remount,bind,ro . && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces cannot be made here")
    count = "from pathlib import Path; from asynckv.keys import AllowList; print(len(AllowList(Path('.'))))"
    env = os.environ | {"PYTHONPATH": str(Path(asynckv.__file__).parents[1])}
    done = subprocess.run([*before, sys.executable, "-c", count], capture_output=True, text=True, env=env)
    assert done.stdout == "2\n", done.stderr


def test_a_secret_among_the_authorized_keys_is_refused(keys: KeysConfig) -> None:
    stray = Path(keys.authorized) / "stray.key"
    stray.write_bytes(Path(keys.secret).read_bytes())
    assert "stray.key' holds a secret key" in refusal(keys)


# -- the allow-list --------------------------------------------------------------------------------


def test_an_allow_list_follows_its_directory(tmp_path: Path) -> None:
    one, two = make_pair(), make_pair()
    _, path = write_pair(tmp_path, "one", one)
    allowed = AllowList(tmp_path)
    assert one.public in allowed
    assert two.public not in allowed
    os.utime(tmp_path, ns=(1, 1))  # the clock of a file system may stand still for some milliseconds
    assert one.public in allowed
    write_pair(tmp_path, "two", two)
    assert two.public in allowed
    path.unlink()
    os.utime(tmp_path, ns=(2, 2))
    assert one.public not in allowed
    assert len(allowed) == 1
    assert allowed.errors == 0


def test_what_cannot_be_read_later_allows_nobody_and_is_counted(tmp_path: Path) -> None:
    one, two = make_pair(), make_pair()
    directory = tmp_path / "keys"
    write_pair(directory, "one", one)
    allowed = AllowList(directory)
    (directory / "bad.key").write_text("public-key = nonsense")
    _, path = write_pair(directory, "two", two)
    os.utime(directory, ns=(1, 1))
    assert {one.public in allowed, two.public in allowed} == {True}
    assert allowed.errors == 1
    directory.rename(tmp_path / "moved")
    assert one.public not in allowed
    assert allowed.errors == 2
    (tmp_path / "moved").rename(directory)
    assert one.public in allowed
    assert path.exists()


def test_an_allow_list_mounted_by_kubernetes_is_followed(tmp_path: Path) -> None:
    # A config map is a directory of links into another one, which is exchanged as a whole.
    one, two = make_pair(), make_pair()
    mount = tmp_path / "mount"
    write_pair(mount / "..v1", "one", one)
    (mount / "..data").symlink_to("..v1")
    (mount / "one.key").symlink_to("..data/one.key")
    allowed = AllowList(mount)
    assert one.public in allowed
    write_pair(mount / "..v2", "one", two)
    (mount / "..new").symlink_to("..v2")
    (mount / "..new").rename(mount / "..data")
    os.utime(mount, ns=(1, 1))
    assert one.public not in allowed
    assert two.public in allowed


# -- asynckv keygen --------------------------------------------------------------------------------


def test_keygen_writes_keys_that_an_engine_takes(tmp_path: Path, command: Command) -> None:
    directory = tmp_path / "new" / "keys"
    before = os.umask(0)
    try:
        status, out, _ = command.run("keygen", "prefill-0", "--dir", directory)
        assert status == 0
    finally:
        os.umask(before)
    secret, public = directory / "prefill-0.key_secret", directory / "prefill-0.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert str(secret) in out
    assert str(public) in out
    assert encode_z85(read_pair(secret).secret) not in out
    ZmqPlane(LOOPBACK, keys=KeysConfig(secret=str(secret), authorized=str(directory)))
    # Neither file is ever overwritten, nor half a pair added.
    contents = secret.read_bytes()
    for removed in (None, public):
        if removed is not None:
            removed.unlink()
        assert "exists and is not overwritten" in command.complaint("keygen", "prefill-0", "--dir", directory)
    assert secret.read_bytes() == contents
    assert not public.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a b", "a\nb", "\u00e4", "x" * 101, "-x", "a\0b"])
def test_names_that_are_none_are_refused(name: str, tmp_path: Path, command: Command) -> None:
    assert command.complaint("keygen", "--dir", tmp_path, "--", name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        assert str(directory) in command.complaint("keygen", "x", "--dir", directory)
