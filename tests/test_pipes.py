"Output that meets a pipe whose reader leaves, nothing at all, a full disk, ASCII alone; text with control characters."
import os
import re
import subprocess
import sys

import pytest
from test_train import MODEL, metrics, zygote  # noqa: F401
from zygote import search_path

from nsa_nb.errors import printable
from nsa_nb.monitoring.report import last_sample

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SMALL = ["--config", "train_showcase", *MODEL, "--dataset", "synthetic", "--steps", 6, "--log-every", 1,
         "--sample-tokens", 300, "--out-dir", "run"]
# what stands on the other side of standard output, and of standard error with it: Python that runs before the verb
INTO = "\nfor fd in (1, 2): os.dup2(w, fd)\n"
NOBODY = {
    "a reader that left": f"import os\nr, w = os.pipe(){INTO}os.close(r)\n",
    "a socket that was closed": f"import os, socket\na, b = socket.socketpair()\nw = a.fileno(){INTO}b.close()\n",
    "a terminal that was closed": f"import os\nmaster, w = os.openpty(){INTO}os.close(w); os.close(master)\n",
    "nothing": "import os\nfor fd in (0, 1, 2): os.close(fd)\n",
}
each_nobody = pytest.mark.parametrize("before", NOBODY.values(), ids=NOBODY.keys())


@pytest.fixture(scope="module")
def trained(zygote, tmp_path_factory):
    "A folder with a run in it, of a model that has learned nothing."
    folder = tmp_path_factory.mktemp("pipes")
    code, said = zygote.run("train", *SMALL, cwd=folder)
    assert code == 0, said
    return folder


BENCH = ["bench", "kernels", "--device", "cpu", "--quick", "--seconds", 0.001, "--shapes", "H2G2D16", "--lengths", 32,
         "--dtype", "fp32", "--out", "k.csv"]
VERBS = [["--help"], ["--version"], ["config", "show"], ["config", "list"], ["config", "--help"], ["help", "train"],
         ["preflight", *SMALL, "--fresh"], ["report", "--dir", "run"],
         ["generate", "--model", "run", "--max-new-tokens", 20], ["data", "audit", "--dir", "run"],
         ["data", "smoke", "--batches", 2, "--dataset", "synthetic", "--seq-len", 16],
         ["signal", "--dir", "run", "stop"], ["trian"], ["train", "--stepz", 3], BENCH]

@pytest.mark.parametrize("words", VERBS, ids=lambda w: " ".join(map(str, w[:2])))
def test_a_verb_goes_on_when_nobody_reads(zygote, trained, words):
    "Its exit code is its own, whoever reads; nothing else is said."
    code, said = zygote.run(*words, cwd=trained)
    assert "Traceback" not in said and code in (0, 1, 2, 3), said
    for before in NOBODY.values(): assert zygote.run(*words, cwd=trained, before=before) == (code, "")
    if words is BENCH: assert len((trained/"k.csv").read_text().splitlines()) > 3


@each_nobody
def test_a_training_that_nobody_reads_goes_on(zygote, tmp_path, before):
    "All lines are in its log, no file of it has what was meant for the screen."
    code, said = zygote.run("train", *SMALL, cwd=tmp_path, before=before)
    assert (code, said) == (0, "") and metrics(tmp_path/"run")["status"] == "done"
    log = (tmp_path/"run"/"train.log").read_text()
    assert [int(n) for n in re.findall(r"^step (\d+)/", log, re.M)] == [1, 2, 3, 4, 5, 6]
    assert len((tmp_path/"run"/"training.csv").read_text().splitlines()) == 7


def test_a_full_disk_is_a_failure(zygote, trained):
    "Standard output on a full disk: said on standard error, exit code 1; a training goes on, its files are elsewhere."
    full = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    for words in (["config", "list"], ["config", "--help"], ["generate", "--model", "run", "--max-new-tokens", 5]):
        code, said = zygote.run(*words, cwd=trained, before=full)
        assert code == 1 and "Traceback" not in said, said
        assert said.splitlines()[-1] == "failed: standard output can't be written: No space left on device"
    code, said = zygote.run("train", *SMALL, "--out-dir", "other", cwd=trained, before=full)
    assert code == 0 and "Traceback" not in said, said


def test_ascii(zygote, trained):
    "What the terminal does not know is escaped, on both outputs."
    ascii_only = "import sys\nfor s in (sys.stdout, sys.stderr): s.reconfigure(encoding='ascii', errors='strict')\n"
    written = ["generate", "--model", "run/model.pt", "--max-new-tokens", 0]
    code, said = zygote.run(*written, "--prompt", "é漢", cwd=trained, before=ascii_only)
    assert (code, said) == (0, "\\xe9\\u6f22\n")
    code, said = zygote.run("report", "--dir", "é", cwd=trained, before=ascii_only)
    assert code == 2 and "\\xe9" in said and "Traceback" not in said, said
    code, said = zygote.run("train", *SMALL, "--out-dir", "é漢", cwd=trained, before=ascii_only)
    assert code == 0 and "\\xe9\\u6f22" in said and (trained/"é漢"/"model.pt").exists(), said
    code, said = zygote.run("train", *SMALL, "--out-dir", "a\udcff", cwd=trained)
    assert code == 2 and "no UTF-8" in said, said
    code, said = zygote.run(*written, "--prompt", "a\udcff", cwd=trained)
    assert (code, said) == (0, "a\ufffd\n")


def test_control_characters_do_not_reach_a_terminal(zygote, trained):
    "What an untrained model over bytes writes has every kind of them: in the file as it is, on the screen escaped."
    samples = (trained/"run"/"samples.txt").read_bytes().decode("utf-8", "replace")
    assert len(set(CONTROLS.findall(samples))) > 5      # else this test shows nothing
    assert not CONTROLS.search(last_sample(samples)) and last_sample(samples) == printable(last_sample(samples))
    code, said = zygote.run("report", "--dir", "run", cwd=trained)
    assert "▶" in said and "\\x" in said and not CONTROLS.search(said)
    draw = ["generate", "--model", "run/model.pt", "--temperature", 1, "--max-new-tokens", 300]
    code, said = zygote.run(*draw, cwd=trained)
    assert code == 0 and "\\x" in said and not CONTROLS.search(said)
    run = zygote.start(*draw, "--raw", cwd=trained)
    assert run.wait() == 0 and printable(run.log.read_bytes().decode()) == said != run.text()
    (trained / "halted").mkdir()
    (trained / "halted" / ".HALT").write_text("halt: \x1b[31mred\x07")
    code, said = zygote.run("train", *SMALL, "--out-dir", "halted", cwd=trained)
    assert code == 2 and r"\x1b[31mred\x07" in said and not CONTROLS.search(said)


def test_in_a_shell(tmp_path):
    "Without forks: the last flush of a process, and a Python that has no standard output at all."
    code = ("from nsa_nb.options import guarded\nfrom nsa_nb.config import load_config, show_config\n"
            "def main(a): print(show_config(load_config(None, None, {})) * 9); return 3\n"
            "raise SystemExit(guarded(main, []))")
    env = os.environ | {"PYTHONPATH": search_path(), "PY": sys.executable, "CODE": code}
    def shell(line):
        done = subprocess.run(["bash", "-c", line], env=env, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr
    code_1, out, err = shell('set -o pipefail; "$PY" -c "$CODE" | head -n 1')
    assert (code_1, err) == (3, "") and out.startswith("model.dim")
    assert shell('"$PY" -c "$CODE" >&- 2>&-') == (3, "", "") and shell('"$PY" -c "$CODE" >&- <&-') == (3, "", "")
    assert shell('"$PY" -u -c "$CODE" | true; exit ${PIPESTATUS[0]}') == (3, "", "")
