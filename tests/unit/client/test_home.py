"""A silo's folder: what is made, what is read, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.client.home.folder import Home, create, locked
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError
from coterie.server.site.certificates import make_ca
from coterie.tasks.base import TaskError
from coterie.wire.enrolment import Bundle, read_request, write_bundle
from tests.commands import coterie


def test_a_new_folder_holds_a_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    home = create(tmp_path / "b", "hospital-b")
    assert (home.folder / "key.pem").stat().st_mode & 0o077 == 0
    assert home.folder.stat().st_mode & 0o077 == 0
    assert read_request(home.request()).name == "hospital-b"
    assert create(tmp_path / "b", "hospital-b").fingerprint() == home.fingerprint(), "kept"
    with pytest.raises(SettingsError, match="is the folder of silo 'hospital-b'"):
        create(tmp_path / "b", "hospital-c")
    with pytest.raises(SettingsError, match="a silo's name must have"):
        create(tmp_path / "c", "../c")


def test_a_folder_that_is_there_does_not_take_another_task_or_data(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    for _ in range(2):  # the same command once more changes nothing
        home = create(folder, "b", task="mnist", data=tmp_path / "images")
    assert home.settings().task == "mnist"
    (folder / "silo.toml").write_text(
        (folder / "silo.toml").read_text().replace(str(tmp_path / "images"), "../images")
    )
    create(folder, "b", data=tmp_path / "images")
    with pytest.raises(SettingsError, match=r"already exists with task 'mnist', not 'cifar10'"):
        create(folder, "b", task="cifar10")
    with pytest.raises(SettingsError, match=r"with data '.*images', not '.*other'"):
        create(folder, "b", data=tmp_path / "other")


def test_the_template_is_valid_and_changes_nothing_of_the_defaults(tmp_path: Path) -> None:
    settings = create(tmp_path, "a").settings()
    assert settings.policy == Policy()
    assert (settings.task, settings.device, settings.threads) == ("digits", "auto", 1)
    assert settings.home == str(tmp_path)


def test_every_line_of_silo_toml_reaches_the_settings(tmp_path: Path) -> None:
    create(tmp_path, "a")
    (tmp_path / "silo.toml").write_text(
        'name = "a"\ntask = "study.toml"\n[data]\ndata = "x.csv"\ntest-share = 0.3\n'
        '[policy]\nstrategies = ["hcct"]\nmin_group_size = 3\nkeep_layers = "head"\n'
        'share_metrics = ["error"]\nauxiliary = false\nlabel_counts = true\nalpha = 20\n'
        "[limits]\nmax_local_epochs = 5\nmax_rounds = 50\n"
        '[compute]\ndevice = "cpu"\nthreads = 2\ngpu_memory = 0.5\nnice = 10\n'
    )
    settings = Home(tmp_path).settings()
    assert settings.task == str(tmp_path / "study.toml"), "paths are meant from the folder"
    assert settings.options == {"data": str(tmp_path / "x.csv"), "test-share": 0.3}
    assert settings.policy == Policy(
        ("hcct",), 3, "head", ("error",), False, True, max_local_epochs=5, max_rounds=50
    )
    assert (settings.alpha, settings.device, settings.threads) == (20.0, "cpu", 2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "[policy]\nmin_group = 3",
            "unknown key 'policy.min_group': the nearest is min_group_size",
        ),
        ("[policy]\nmin_group_size = 0", "policy.min_group_size"),
        ('[policy]\nshare_metrics = ["a, b"]', "policy.share_metrics"),
        ("[compute]\ngpu_memory = 2.0", "compute.gpu_memory"),
        ("[compute", "is not TOML"),
    ],
)
def test_a_wrong_silo_toml_is_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "silo.toml").write_text(f'name = "a"\ntask = "digits"\n{line}\n')
    with pytest.raises(SettingsError, match=said):
        Home(tmp_path)


def test_a_silo_toml_in_another_encoding_is_named(tmp_path: Path) -> None:
    text = 'name = "a"\ntask = "digits"\n# für die Chirurgie\n'
    (tmp_path / "silo.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=r"silo\.toml is not UTF-8: .* Save it as UTF-8"):
        Home(tmp_path)


def test_a_silo_toml_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    text = 'name = "a"\ntask = "digits"\n# für die Chirurgie\n'
    (tmp_path / "silo.toml").write_bytes(text.encode("utf-8-sig"))
    assert Home(tmp_path).settings().name == "a"


@pytest.mark.parametrize("name", ["x\U0001f3e5y", 'a "b" \\ c', "tab\tdel\x7f", "Größe"])
def test_any_name_of_a_folder_is_written_as_toml(name: str, tmp_path: Path) -> None:
    data = tmp_path / name / "data"
    home = create(tmp_path / name / "a", "a", data=data)
    assert home.settings().options == {"data": str(data)}


def test_a_name_that_cannot_be_in_a_silo_toml_is_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingsError, match="the name is not UTF-8"):
        create(tmp_path / "a", "a", data=tmp_path / "x\udcff")
    assert not (tmp_path / "a" / "silo.toml").exists()


def test_the_home_folder_of_nobody_is_named(tmp_path: Path) -> None:
    said = "there is no home folder ~nobody-here"
    (tmp_path / "silo.toml").write_text(
        'name = "a"\ntask = "digits"\n[data]\ndata = "~nobody-here/x"\n'
    )
    with pytest.raises(TaskError, match=said):
        Home(tmp_path).settings()
    with pytest.raises(TaskError, match=said):
        Home(Path("~nobody-here/x"))
    with pytest.raises(TaskError, match=said):
        create(Path("~nobody-here/x"), "a")
    with pytest.raises(TaskError, match=said):
        create(tmp_path / "b", "b", data=Path("~nobody-here/x"))


def test_what_is_no_silo_s_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="coterie silo init"):
        Home(tmp_path)


def test_a_bundle_for_another_silo_or_key_is_refused(tmp_path: Path) -> None:
    make_ca(tmp_path / "tls", "study")
    ca = (tmp_path / "tls" / "ca.pem").read_bytes()
    home = create(tmp_path / "a", "a")
    with pytest.raises(SettingsError, match="has not joined a federation"):
        home.coordinator()
    for name, key in (("b", home.fingerprint()), ("a", "0000-" * 7 + "0000")):
        with pytest.raises(SettingsError, match="this bundle was made for silo"):
            home.join(write_bundle(Bundle(name, key, "fl.example.org:9092", ca)))
    home.join(write_bundle(Bundle("a", home.fingerprint(), "fl.example.org:9092", ca)))
    address, file = home.coordinator()
    assert (address, file.read_bytes()) == ("fl.example.org:9092", ca)
    home.new_key()
    with pytest.raises(SettingsError, match="has not joined"):
        home.coordinator()


def test_the_certificate_is_that_of_the_coordinator_joined(tmp_path: Path) -> None:
    """A crash may come between the two files."""
    make_ca(tmp_path / "tls", "study")
    ca = (tmp_path / "tls" / "ca.pem").read_bytes()
    home = create(tmp_path / "a", "a")
    home.join(write_bundle(Bundle("a", home.fingerprint(), "fl.example.org:9092", ca)))
    for left in (None, b"of another coordinator"):
        (home.folder / "ca.pem").unlink()
        if left:
            (home.folder / "ca.pem").write_bytes(left)
        assert home.coordinator()[1].read_bytes() == ca
    only_address = '{"address": "fl.example.org:9092"}'
    for damaged in (only_address, '["fl.example.org:9092"]', "", "{}"):
        (home.folder / "coordinator.json").write_text(damaged)
        with pytest.raises(SettingsError, match=r"coordinator.json is damaged. Run .* join"):
            home.coordinator()


def test_what_is_to_be_done_next_is_said_with_the_folder_unless_it_is_found_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ca(tmp_path / "tls", "study")
    ca = (tmp_path / "tls" / "ca.pem").read_bytes()
    monkeypatch.chdir(tmp_path)
    said = coterie("silo", "init", "--name", "alpha").stderr
    for command in ("check", "join", "serve"):
        assert f"`coterie silo {command} --home alpha`" in said
    home = Home(tmp_path / "alpha")
    bundle = write_bundle(Bundle("alpha", home.fingerprint(), "fl.example.org:9092", ca))
    assert "silo serve --home alpha\n" in coterie("silo", "join", "--home", "alpha", bundle).stderr
    monkeypatch.chdir(tmp_path / "tls")
    joined = coterie("silo", "join", "--home", "../alpha", bundle).stderr
    assert f"silo serve --home {home.folder}\n" in joined
    monkeypatch.setenv("COTERIE_SILO", "../alpha")
    assert "silo serve\n" in coterie("silo", "join", bundle).stderr
    monkeypatch.delenv("COTERIE_SILO")
    monkeypatch.chdir(home.folder)
    assert "silo serve\n" in coterie("silo", "join", bundle).stderr


def test_a_folder_serves_one_process(tmp_path: Path) -> None:
    home = create(tmp_path, "a")
    running = pytest.raises(SettingsError, match="already running from")
    with locked(home.folder), running, locked(home.folder):
        pass
    with locked(home.folder):
        pass


def test_a_bundle_with_another_address_says_what_it_replaces(tmp_path: Path) -> None:
    make_ca(tmp_path / "tls", "study")
    ca = (tmp_path / "tls" / "ca.pem").read_bytes()
    home = create(tmp_path / "a", "a")
    old, new = "old.example.org:9092", "new.example.org:9092"

    def join(address: str) -> str:
        bundle = write_bundle(Bundle("a", home.fingerprint(), address, ca))
        return coterie("silo", "join", "--home", str(home.folder), bundle).stderr

    for address in (new, new):
        said = join(address)
        assert "replaces" not in said and "Next: coterie silo serve" in said
    said = join(old)
    assert f"This replaces {new} by {old}. If the coordinator is no longer at that address," in said
    with locked(home.folder):
        assert "is running and still uses its" in join(new)
