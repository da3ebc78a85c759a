"""The mirror and key taken from a host's apt sources, and the private apt's configuration."""

import subprocess
from pathlib import Path

import pytest

from agentenv.core.errors import HostNotReady, Internal, InvalidInput, NotFound, Unavailable
from agentenv.host import debian
from agentenv.host.debian import (
    AptSource,
    DebianMirror,
    PrivateApt,
    choose_mirror,
    host_sources,
    inherited_settings,
    parse_source_lines,
    parse_source_stanzas,
)

ONE_LINE = """\
# deb http://old.example/debian bookworm main
deb http://mirror.example/debian/ bookworm main contrib
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/own.gpg] https://third.example/apt stable-app main  # a comment
deb [ arch=amd64 ] http://security.example/debian-security bookworm-security main
"""
STANZAS = """\
# Third-party first
Types: deb
URIs: https://third.example/node
Suites: nodistro
Components: main
Signed-By: /usr/share/keyrings/third.gpg

Enabled: no
Types: deb
URIs: http://disabled.example/debian
Suites: bookworm
Components: main

Types: deb deb-src
# the archive
URIs: http://one.example/debian http://two.example/debian
Suites: bookworm bookworm-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://one.example/debian-security
Suites: bookworm-security
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main
"""


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    path = tmp_path / "debian-archive-keyring.gpg"
    path.write_bytes(b"key")
    return path


def test_one_line_sources() -> None:
    assert parse_source_lines(ONE_LINE) == [
        AptSource("http://mirror.example/debian/", ("bookworm",), ("main", "contrib")),
        AptSource("https://third.example/apt", ("stable-app",), ("main",), "/usr/share/keyrings/own.gpg"),
        AptSource("http://security.example/debian-security", ("bookworm-security",), ("main",)),
    ]


def test_stanzas() -> None:
    found = parse_source_stanzas(STANZAS)
    assert [source.uri for source in found] == [
        "https://third.example/node",
        "http://one.example/debian",
        "http://two.example/debian",
        "http://one.example/debian-security",
    ]
    assert found[1].suites == ("bookworm", "bookworm-updates")
    assert found[1].components == ("main", "contrib")
    assert found[1].signed_by == "/usr/share/keyrings/debian-archive-keyring.gpg"


def test_embedded_key_keeps_its_lines() -> None:
    text = "Types: deb\nURIs: http://a.example/debian\nSuites: trixie\nComponents: main\nSigned-By:\n"
    text += " -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINB\n -----END PGP PUBLIC KEY BLOCK-----\n"
    (found,) = parse_source_stanzas(text)
    assert found.signed_by == "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmQINB\n-----END PGP PUBLIC KEY BLOCK-----\n"
    assert choose_mirror([found], Path("/nonexistent")).signed_by == found.signed_by


def test_first_debian_archive_is_chosen_and_its_security_archive(keyring: Path) -> None:
    mirror = choose_mirror(parse_source_lines(ONE_LINE), keyring)
    assert mirror == DebianMirror("http://mirror.example/debian", "http://security.example/debian-security", str(keyring))
    mirror = choose_mirror(
        parse_source_stanzas(STANZAS.replace("/usr/share/keyrings/debian-archive-keyring.gpg", str(keyring))), Path("/none")
    )
    assert mirror == DebianMirror("http://one.example/debian", "http://one.example/debian-security", str(keyring))


@pytest.mark.parametrize("suite", ["stable", "sid", "trixie", "bullseye"])
def test_other_releases_of_debian_have_the_same_archive(keyring: Path, suite: str) -> None:
    assert choose_mirror([AptSource("http://m.example/debian", (suite,), ("main",))], keyring).uri == "http://m.example/debian"


def test_old_security_suite_name(keyring: Path) -> None:
    sources = [
        AptSource("http://m.example/debian", ("buster",), ("main",)),
        AptSource("http://s.example/debian-security", ("buster/updates",), ("main",)),
    ]
    assert choose_mirror(sources, keyring).security_uri == "http://s.example/debian-security"


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [AptSource("http://archive.example/ubuntu", ("noble",), ("main", "universe"))],
        [AptSource("https://third.example/apt", ("stable-app",), ("main",))],
        [AptSource("cdrom:[Debian GNU/Linux 12]/", ("bookworm",), ("main",))],
        [AptSource("http://m.example/debian", ("bookworm",), ("contrib",))],
        [AptSource("http://m.example/debian", ("bookworm-backports",), ("main",))],
    ],
)
def test_no_debian_archive_is_an_error_with_a_hint(keyring: Path, sources: list[AptSource]) -> None:
    with pytest.raises(HostNotReady) as caught:
        choose_mirror(sources, keyring)
    assert caught.value.hint


def test_no_key_is_an_error() -> None:
    with pytest.raises(HostNotReady, match="no archive keyring"):
        choose_mirror([AptSource("http://m.example/debian", ("bookworm",), ("main",), "ABCDEF0123456789")], Path("/nonexistent.gpg"))


def test_mirror_list_of_cloud_images(tmp_path: Path, keyring: Path) -> None:
    listed = tmp_path / "debian.list"
    source = AptSource(f"mirror+file:{listed}", ("bookworm",), ("main",))
    with pytest.raises(HostNotReady, match="cannot read the mirror list"):
        choose_mirror([source], keyring)
    listed.write_text("# mirrors\nhttps://first.example/debian/\tpriority:1\nhttps://second.example/debian\n")
    assert choose_mirror([source], keyring).uri == "https://first.example/debian"
    listed.write_text("\n")
    with pytest.raises(HostNotReady, match="is empty"):
        choose_mirror([source], keyring)


def test_host_sources_follow_apt_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "main.list").write_text("deb http://a.example/debian bookworm main\n")
    (parts / "b.sources").write_text("Types: deb\nURIs: http://b.example/debian\nSuites: bookworm\nComponents: main\n")
    (parts / "c.list").write_text("deb http://c.example/debian bookworm main\n")
    (parts / "d.list.disabled").write_text("deb http://d.example/debian bookworm main\n")
    answer = f"LIST='{tmp_path}/main.list'\nPARTS='{parts}/'\n".encode()
    monkeypatch.setattr(debian, "run_command", lambda *_, **__: answer)
    assert [source.uri[7] for source in host_sources()] == ["a", "b", "c"]


def test_only_network_settings_are_inherited() -> None:
    dump = (
        'APT::Update::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb";\n'
        'Dir::Etc::sourcelist "sources.list";\n'
        'Acquire::http::Proxy "http://proxy.example:3128/";\n'
        'Acquire::https::CAInfo "/etc/ca.crt";\n'
        'Acquire::Retries "3";\n'
        'Acquire::Languages "en";\n'
        'Acquire::AllowInsecureRepositories "1";\n'
    )
    assert inherited_settings(dump) == (
        'Acquire::http::Proxy "http://proxy.example:3128/";\nAcquire::https::CAInfo "/etc/ca.crt";\nAcquire::Retries "3";\n'
    )


class FakeApt:
    """Stands for apt's programs: answers by program name, records the calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.answers: dict[str, list[bytes | Exception]] = {}

    def __call__(self, argv, **options) -> bytes:
        words = [str(word) for word in argv]
        self.calls.append(words)
        answers = self.answers.get(" ".join(words[:2])) or self.answers.get(words[0]) or [b""]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def count(self, *start: str) -> int:
        return sum(call[: len(start)] == list(start) for call in self.calls)


@pytest.fixture
def fake_apt(monkeypatch: pytest.MonkeyPatch) -> FakeApt:
    fake = FakeApt()
    fake.answers["apt-config"] = [b'Acquire::http::Proxy "http://proxy.example:3128";\nAPT::Update::Post-Invoke:: "true";\n']
    monkeypatch.setattr(debian, "run_command", fake)
    return fake


def private(folder: Path, mirror: DebianMirror | None = None) -> PrivateApt:
    return PrivateApt(folder, "bookworm", mirror or DebianMirror("http://m.example/debian", "http://s.example/sec", "/k.gpg"))


def test_private_configuration_names_only_its_own_folders(tmp_path: Path, fake_apt: FakeApt) -> None:
    apt = private(tmp_path / "apt")
    text = (tmp_path / "apt/apt.conf").read_text()
    values = dict(line.rstrip(";").split(" ", 1) for line in text.splitlines())
    assert values["Acquire::http::Proxy"] == '"http://proxy.example:3128"'
    assert "Post-Invoke" not in text
    folders = [value.strip('"') for key, value in values.items() if key.startswith("Dir::")]
    assert all(folder in ("/dev/null", "") or folder.startswith(str(tmp_path / "apt")) for folder in folders)
    assert {"Dir::State::status", "Dir::State::lists", "Dir::Cache::archives", "Dir::Etc::parts"} <= set(values)
    assert (tmp_path / "apt/status").read_bytes() == b""
    assert apt.suites == ("bookworm", "bookworm-updates", "bookworm-security", "bookworm-backports")
    sources = parse_source_stanzas((tmp_path / "apt/sources.d/debian.sources").read_text())
    assert [(source.uri, source.suites[0]) for source in sources] == [
        ("http://m.example/debian", "bookworm"),
        ("http://m.example/debian", "bookworm-updates"),
        ("http://s.example/sec", "bookworm-security"),
        ("http://m.example/debian", "bookworm-backports"),
    ]
    assert {source.signed_by for source in sources} == {"/k.gpg"}


def test_apt_for_a_suite_is_that_of_its_release(tmp_path: Path, fake_apt: FakeApt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "host_mirror", lambda: DebianMirror("http://m.example/debian", "", "/k.gpg"))
    apt = PrivateApt.for_suite(tmp_path, "trixie-backports")
    assert (apt.folder, apt.release) == (tmp_path / "trixie", "trixie")
    assert "trixie-backports" in apt.suites
    with pytest.raises(InvalidInput):
        PrivateApt.for_suite(tmp_path, "../x")


def test_embedded_key_survives_writing_and_reading(tmp_path: Path, fake_apt: FakeApt) -> None:
    key = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmQINB\n-----END PGP PUBLIC KEY BLOCK-----\n"
    apt = private(tmp_path, DebianMirror("http://m.example/debian", "", key))
    assert "bookworm-security" not in apt.suites
    assert {source.signed_by for source in parse_source_stanzas(apt.source_stanzas())} == {key}


@pytest.mark.skipif(subprocess.run(["sh", "-c", "command -v apt-config"], capture_output=True).returncode != 0, reason="needs apt")
def test_apt_itself_reads_the_configuration_so(tmp_path: Path) -> None:
    private(tmp_path)
    dump = subprocess.run(
        ["apt-config", "dump"],
        env={"APT_CONFIG": str(tmp_path / "apt.conf"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
        timeout=20,
    ).stdout.decode()
    assert f'Dir::State::status "{tmp_path}/status";' in dump
    assert f'Dir::Cache::archives "{tmp_path}/archives";' in dump
    assert "Post-Invoke" not in dump
    assert 'Acquire::AllowInsecureRepositories "1"' not in dump


def test_lists_are_fetched_once_an_hour_and_when_forced(tmp_path: Path, fake_apt: FakeApt) -> None:
    apt = private(tmp_path)
    apt.update()
    apt.update()
    assert fake_apt.count("apt-get", "update") == 1
    apt.update(force=True)
    assert fake_apt.count("apt-get", "update") == 2
    private(tmp_path, DebianMirror("http://other.example/debian", "", "/k.gpg")).update()
    assert fake_apt.count("apt-get", "update") == 3


def test_failed_update_is_unavailable_and_is_tried_again(tmp_path: Path, fake_apt: FakeApt) -> None:
    fake_apt.answers["apt-get update"] = [Internal("apt-get failed with status 100: cannot resolve"), b""]
    apt = private(tmp_path)
    with pytest.raises(Unavailable, match="cannot resolve"):
        apt.update()
    apt.update()
    assert fake_apt.count("apt-get", "update") == 2


def test_closure_is_downloaded_and_counted_in_bytes(tmp_path: Path, fake_apt: FakeApt) -> None:
    apt = private(tmp_path)
    fake_apt.answers["apt-get install"] = [
        b"'http://m.example/a_1%3a2_amd64.deb' a_1%3a2_amd64.deb 7 SHA256:00\n'http://m.example/b.deb' b_1_all.deb 5 SHA256:00\n"
    ]
    (tmp_path / "archives/a_1%3a2_amd64.deb").write_bytes(b"1234567")
    (tmp_path / "archives/b_1_all.deb").write_bytes(b"12345")
    seen = []
    paths = apt.download(["aa=1:2"], "bookworm-backports", progress=lambda *step: seen.append(step))
    assert [path.name for path in paths] == ["a_1%3a2_amd64.deb", "b_1_all.deb"]
    assert seen[-1] == ("fetch aa (bytes)", 12, 12)
    apt.discard(paths)
    assert list((tmp_path / "archives").glob("*.deb")) == []
    assert fake_apt.calls[-1] == ["apt-get", "install", "--download-only", "-qq", "-y", "-t", "bookworm-backports", "aa=1:2"]


def test_package_that_left_the_mirror_makes_the_lists_fresh(tmp_path: Path, fake_apt: FakeApt) -> None:
    apt = private(tmp_path)
    listed = b"'http://m.example/a.deb' a_1_amd64.deb 7 SHA256:00\n"
    fake_apt.answers["apt-get download"] = [listed, Internal("404 Not Found"), listed, b""]
    (tmp_path / "archives/a_1_amd64.deb").write_bytes(b"1234567")
    assert len(apt.download(["aa"], closure=False)) == 1
    assert fake_apt.count("apt-get", "update") == 2


def test_download_that_fails_twice_is_unavailable(tmp_path: Path, fake_apt: FakeApt) -> None:
    apt = private(tmp_path)
    listed = b"'http://m.example/a.deb' a_1_amd64.deb 7 SHA256:00\n"
    fake_apt.answers["apt-get download"] = [listed, Internal("404"), listed, Internal("404")]
    with pytest.raises(Unavailable, match="cannot fetch aa"):
        apt.download(["aa"], closure=False)


def test_fetched_but_missing_file_is_a_fault(tmp_path: Path, fake_apt: FakeApt) -> None:
    fake_apt.answers["apt-get download"] = [b"'http://m.example/a.deb' a_1_amd64.deb 7 SHA256:00\n"]
    with pytest.raises(Internal, match=r"did not fetch a_1_amd64\.deb"):
        private(tmp_path).download(["aa"], closure=False)


def test_show_gives_the_first_stanza(tmp_path: Path, fake_apt: FakeApt) -> None:
    fake_apt.answers["apt-cache"] = [b"Package: a\nVersion: 2\nDescription: x\n more: text\nDepends: b (= 2)\n\nPackage: a\nVersion: 1\n"]
    assert private(tmp_path).show("aa", "bookworm") == {"Package": "a", "Version": "2", "Description": "x", "Depends": "b (= 2)"}
    fake_apt.answers["apt-cache"] = [Internal("No packages found")]
    with pytest.raises(NotFound, match="bookworm has no package none"):
        private(tmp_path).show("none", "bookworm")


@pytest.mark.parametrize("word", ["-o", "--foo", "a b", "", "a;b", "A", "../a"])
def test_words_that_look_like_options_are_refused(tmp_path: Path, fake_apt: FakeApt, word: str) -> None:
    apt = private(tmp_path)
    with pytest.raises(InvalidInput):
        apt.show(word, "bookworm")
    with pytest.raises(InvalidInput):
        apt.closure([word])
    with pytest.raises(InvalidInput):
        apt.show("a-package", word)
