"""The order in which jobs run while others become ready, and jobs that another command runs."""

from pathlib import Path

from benchmarks.studies.jobs import Job
from benchmarks.studies.launching import Launcher
from benchmarks.studies.queue import Queue
from tests.benchmarks.made import write_record
from tests.benchmarks.studies.fakes import Ended
from tests.benchmarks.studies.toy import command, finish, kept_study


def made(tmp_path: Path, name: str) -> Job:
    return Job([], tmp_path / name, tmp_path / f"{name}.log", name)


def test_a_job_that_becomes_ready_runs_before_later_ones(tmp_path, monkeypatch):
    first, second, follows = (made(tmp_path, name) for name in ("first", "second", "follows"))
    started: list[str] = []

    def place(launcher: Launcher, command: list[str], job: Job) -> Ended:
        started.append(job.name)
        write_record(job.folder)
        return Ended(lambda: 0)

    def ready() -> list[Job]:
        found = [first, follows, second] if first.is_finished() else [first, second]
        return [job for job in found if not job.is_finished()]

    monkeypatch.setattr(Launcher, "place", place)
    monkeypatch.setattr(Job, "changes", lambda job: [])
    queue = Queue(ready, 2, Launcher())
    assert queue.run() == 0
    assert started == ["first", "follows", "second"]
    assert [job.status for job in queue.jobs] == ["finished"] * 3
    assert queue.bar.total == queue.bar.n == 3


def test_a_study_waits_for_runs_of_another_command(toy, trained_by, monkeypatch, capsys):
    taken: list[Job] = []

    def train(jobs: list[Job]) -> None:
        taken.append(jobs[0])
        jobs[0].status = "in use"
        for job in jobs[1:]:
            finish(job, 0.5)

    def in_use(job: Job) -> bool:
        finish(job, 0.7)  # by the other command
        return False

    trained_by(train)
    monkeypatch.setattr(Job, "in_use", in_use)
    assert command() == 0
    assert "Waiting for 1 runs of another command" in capsys.readouterr().out
    assert [kept_study().results.of(job)["metrics"]["recall_at_1"] for job in taken] == [0.7]


def test_a_job_that_cannot_be_started_is_one_failure(tmp_path, monkeypatch):
    jobs = [made(tmp_path, name) for name in ("first", "second")]
    jobs[0].log = tmp_path / "file" / "log"
    (tmp_path / "file").touch()
    monkeypatch.setattr(Launcher, "place", lambda launcher, command, job: Ended(lambda: 1))
    assert Queue(lambda: jobs, 2, Launcher()).run() == 0
    assert [job.exit_status for job in jobs] == [None, 1]
    assert "File exists" in str(jobs[0].why)
