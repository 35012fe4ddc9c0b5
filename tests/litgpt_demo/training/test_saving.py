"""Saving next to the training: what is saved is the state at that moment, and an error costs one save, no training."""

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from threading import Barrier, Event, current_thread
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch
from bucket_faults import FOREVER, FailureClass, FaultyBucket
from hostile import flip_a_bit
from lightning.fabric import Fabric
from states import Pair, pair, same, stepped_by_hand, tensors, training_of
from torch import nn
from torch.autograd import DeviceType

from litgpt_demo import documents
from litgpt_demo.errors import DataError, DiskFull, NetworkError, NodeError, TrainLitgptError, UserError
from litgpt_demo.storage import LocalStorage, ObjectInfo, Storage, open_storage
from litgpt_demo.storage.bucket import BucketStorage
from litgpt_demo.training import resuming, saving
from litgpt_demo.training.checkpoint_reader import load_checkpoint, training_state
from litgpt_demo.training.checkpoints import folder_of, list_complete
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saver, SaveResult, StateReferences
from litgpt_demo.training.setup import BatchLoader, Training
from litgpt_demo.training.step import train_step

NewTraining: TypeAlias = Callable[..., Training]


@pytest.fixture
def new_training(new_run: Callable[..., Path]) -> Iterator[NewTraining]:
    """Makes a training of a run that may be there already: `new_training("run", seed=2)`."""
    with ExitStack() as feeds:

        def make(name: str = "run", *, root: Storage | None = None, **changes: object) -> Training:
            training = training_of(new_run(name, **changes), root)
            feeds.callback(training.feed.close)
            return training

        yield make


def steps_kept(training: Training) -> list[int]:
    return [found.step for found in list_complete(training.run)]


def whole(training: Training) -> Pair:
    return training.model.module, training.optimizer.optimizer


def left_in(training: Training) -> list[str]:
    """Every file of the run's checkpoints and of the scratch folder, whoever made it."""
    scratch = training.scratch.rglob("*")
    return training.run.within("checkpoints").list() + [str(path) for path in scratch if path.suffix == ".distcp"]


def silent(saved: SaveResult) -> None:
    assert saved.warning is None, saved.warning


def test_saves_pin_one_block_of_the_states_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own pinned memory would take the next power of two for each tensor."""
    success, refusal = DeviceType.CPU, DeviceType.CUDA  # 0 and 1, but both are true, as cudaError is
    seen, stream = list[tuple[int, ...]](), SimpleNamespace(wait_event=bool, synchronize=lambda: None)
    cudart = dict.fromkeys(("cudaHostRegister", "cudaHostUnregister"), lambda *block: seen.append(block) or success)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**cudart))
    monkeypatch.setattr(torch.cuda, "check_error", int)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    shards, trained = saving.ShardWriter(Ranks(rank=0, world_size=1), torch.device("cuda", 0)), pair(1)
    state = training_state(*trained, {})
    shards.plan(state)
    for _ in range(2):
        shards.stage_to_host(state, None)
    copies = [copy for copy in shards._copies.values() if isinstance(copy, torch.Tensor)]
    size = sum(copy.nbytes for copy in copies)
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copies), "written without another copy"
    (start, registered, _), *more = seen
    assert (size <= registered < size + 64 * len(copies), more) == (True, [])
    shards.close()
    assert seen[1:] == [(start,)]
    cudart["cudaHostRegister"] = lambda *_: refusal
    shards.stage_to_host(state, None)
    shards.close()
    assert seen[2:] == [], "what was not pinned is not unpinned"
    assert capsys.readouterr().out.startswith("warning: saves are copied through pageable memory")


def test_threads_of_a_rank_work_on_its_device(new_training: NewTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, whatever its process uses: each rank of a node would make a context there."""
    taken: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append((current_thread().name, device)))
    training, device = new_training(), torch.device("cuda", 3)
    monkeypatch.setattr(saving, "ShardWriter", lambda *_: SimpleNamespace(close=bool))
    fabric = SimpleNamespace(device=device, world_size=1, global_rank=0)
    feed = BatchLoader(training.spec, training.data.train, device, rank=0)
    with Saver(replace(training, fabric=cast(Fabric, fabric)), on_result=silent) as saver, closing(feed):
        saver._thread.submit(str).result()
        with suppress(RuntimeError):  # where there is no GPU, nothing can be pinned for one
            feed.get(0)
    assert taken == [("checkpoint_0", device), ("feed_0", device)]


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_a_gpu)])
def test_save_has_the_state_of_its_moment(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a state so large that its copy takes longer than the training needs to change it."""
    trained, restored = pair(1, width=768, device=device), pair(2, steps=0, width=768, device=device)
    fabric = Fabric(accelerator=device, devices=1)
    model = fabric.setup_module(trained[0])
    training = stepped_by_hand(tmp_path, fabric, model, fabric.setup_optimizers(trained[1]))
    model(torch.randint(0, 64, (2, 32), device=device)).square().mean().backward()
    before = [tensor.clone() for tensor in tensors(*trained)]
    with Saver(training, on_result=silent) as saver:
        saver.save(1, None)
        training.optimizer.param_groups[0]["lr"] = 0.5  # as the next step begins
        training.optimizer.step()
    assert not all(map(torch.equal, before, tensors(*trained)))
    load_checkpoint(*restored, Path(training.run.address(folder_of(1))))
    assert all(map(torch.equal, before, tensors(*restored)))
    assert "warning" not in capsys.readouterr().out, "a GPU's copy goes through pinned memory"


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same form."""
    return tensor.detach().clone().add_(1)


def replace_average(training: Training) -> None:
    if training.average is not None:
        name = next(iter(training.average.tensors))
        training.average.tensors[name] = changed(training.average.tensors[name])


def replace_memory_of_weight(training: Training) -> None:
    weight = next(training.model.module.parameters())
    weight.data = changed(weight)


def replace_weight(training: Training) -> None:
    model, optimizer = whole(training)
    before = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(changed(before))
    for group in optimizer.param_groups:
        group["params"] = [model.lm_head.weight if weight is before else weight for weight in group["params"]]
    optimizer.state[model.lm_head.weight] = optimizer.state.pop(before)


def replace_tensor_of_state(training: Training) -> None:
    [state, *_] = whole(training)[1].state.values()
    name = next(name for name, value in state.items() if value.dim())
    state[name] = changed(state[name])


def replace_state_of_weight(training: Training) -> None:
    optimizer = whole(training)[1]
    weight = next(iter(optimizer.state))
    optimizer.state[weight] = {name: changed(value) for name, value in optimizer.state[weight].items()}


def add_number_to_state(training: Training) -> None:
    """A number is not changed in place, so each change needs a new walk."""
    [state, *_] = whole(training)[1].state.values()
    state["count"] = state.get("count", 0) + 1


def forget_state(training: Training) -> None:
    whole(training)[1].state.clear()


REPLACEMENTS = [
    replace_average, replace_memory_of_weight, replace_weight, replace_tensor_of_state, replace_state_of_weight,
    add_number_to_state, add_number_to_state, forget_state,
]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer": "muon", "weight_average": 0.9}, {"precision": "bf16-true"}],
    ids=str,
)
def test_references_are_always_those_of_a_new_walk(
    new_training: NewTraining, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """After steps, a resume, and any replacement; steps alone need no walk."""
    training, walks = new_training(**settings), list[object]()
    monkeypatch.setattr(saving, "training_state", lambda *parts: walks.append(parts) or training_state(*parts))
    references, scales = StateReferences(training), count()
    # As a scaler of losses has, which is only on GPUs.
    precision = training.fabric.strategy.precision
    monkeypatch.setattr(precision, "state_dict", lambda: {"scale": next(scales)})

    def check() -> None:
        present = training_state(*whole(training), {"scale": next(scales) + 1}, training.average_tensors)
        torch.testing.assert_close(references.collect(), present, rtol=0, atol=0)

    with Saver(training, on_result=silent) as saver:
        check()
        for number in range(3):
            train_step(training, number)
            check()
            saver.save(number + 1, None)
    assert len(walks) == 2, "one for each of the two that refer to it"
    assert resume(training, on_warning=pytest.fail) == 3
    check()
    train_step(training, 3)
    check()
    for replacement in REPLACEMENTS:
        replacement(training)
        check()


def test_a_training_resumes_bit_for_bit_with_any_random_state(new_training: NewTraining) -> None:
    through, first = new_training("through"), new_training("run")
    dropout(through), dropout(first)
    for number in range(4):
        train_step(through, number)
    with Saver(first, on_result=silent) as saver:
        for number in range(2):
            train_step(first, number)
        saver.save(2, None)
        train_step(first, 2)  # and is killed
    torch.manual_seed(99)  # what another process would have
    second = new_training("run")
    dropout(second)
    assert resume(second, on_warning=pytest.fail) == 2
    for number in range(2, 4):
        train_step(second, number)
    assert same(whole(second), whole(through))


def dropout(training: Training) -> None:
    """LitGPT's models have none; this one does now."""
    training.model.module.transformer.h[0].register_forward_hook(lambda _, __, out: nn.functional.dropout(out, 0.5))


def test_each_save_waits_for_the_one_before(new_training: NewTraining) -> None:
    """The last save before an error is committed."""
    training, results = new_training(keep_last=9), list[SaveResult]()

    def fall() -> None:
        with Saver(training, on_result=results.append) as saver:
            for number in range(1, 5):
                train_step(training, number)
                saver.save(number, float(number))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fall()
    assert steps_kept(training) == [4, 3, 2, 1] == [saved.step for saved in reversed(results)]
    for saved, manifest in zip(results, reversed(list_complete(training.run)), strict=True):
        assert (saved.size, manifest.validation_loss) == (manifest.size, float(saved.step))
        assert saved.warning is None


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The disk is full for whoever writes more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_one_save(new_training: NewTraining) -> None:
    """The warning says how to get room."""
    training, results = new_training(), list[SaveResult]()
    with Saver(training, on_result=results.append) as saver:
        train_step(training, 0)
        with no_file_above(10_000):
            saver.save(1, None)
            with pytest.raises(DiskFull):
                saver.finish()
        assert left_in(training) == []
        train_step(training, 1)
        saver.save(2, None)
    assert [saved.error is None for saved in results] == [False, True]
    assert str(results[0].warning).startswith("the checkpoint of step 1 was not saved: ")
    assert f"older checkpoints from {training.run.address('checkpoints')}" in str(results[0].warning)
    again = new_training()
    assert resume(again, on_warning=pytest.fail) == 2
    assert same(whole(again), whole(training))


@dataclass(frozen=True)
class RottenDisk(LocalStorage):
    """Turns a bit of every shard that it is given while there is a file `rotten` in it."""

    def upload(self, source: Path, path: str, *, move: bool = False) -> ObjectInfo:
        stored = super().upload(source, path, move=move)
        if path.endswith(".distcp") and self.exists("rotten"):
            flip_a_bit(Path(self.address(path)))
        return stored


def test_nothing_is_removed_before_its_successor_verifies(new_training: NewTraining, tmp_path: Path) -> None:
    training, results = (
        new_training(root=RottenDisk(str(tmp_path / "root")), keep_last=1, keep_best=0),
        list[SaveResult](),
    )
    with Saver(training, on_result=results.append) as saver:
        train_step(training, 0)
        saver.save(1, None)
        saver.finish()
        training.run.write("rotten", b"")
        saver.save(2, None)
        with pytest.raises(DataError, match=r"__0_0\.distcp has crc32c \w+, but its manifest says"):
            saver.finish()
        assert steps_kept(training) == [1]
        training.run.remove("rotten")
        saver.save(3, None)
    assert steps_kept(training) == [3]


def test_a_bucket_that_refuses_costs_one_save(new_training: NewTraining, bucket: Storage, proxy: FaultyBucket) -> None:
    training, results = new_training(root=bucket, keep_last=1, keep_best=0), list[SaveResult]()
    with Saver(training, on_result=results.append) as saver:
        train_step(training, 0)
        proxy.arm(FailureClass(on="upload", do="refuse", status=403, times=FOREVER))
        saver.save(1, None)
        with pytest.raises(UserError, match=f"{bucket.address(folder_of(1))}/"):
            saver.finish()
        assert left_in(training) == []
        proxy.arm(FailureClass(on="delete", do="refuse", status=403, times=FOREVER))
        for number in (2, 3):
            saver.save(number, None)
            saver.finish()
        assert steps_kept(training) == [3, 2]  # an old one that cannot be removed costs none
        proxy.arm()
        saver.save(4, None)
    assert steps_kept(training) == [4]
    assert [saved.error is None for saved in results] == [False, True, True, True]
    assert f"older ones in {bucket.address('checkpoints')}" in str(results[2].warning)


def test_a_damaged_checkpoint_is_quarantined_and_not_read_again(new_training: NewTraining, root: str) -> None:
    def new() -> Training:
        return new_training("three", root=open_storage(root), keep_last=9)

    run = new().run
    with Saver(new(), on_result=silent) as saver:
        for number in (1, 2, 3):
            saver.save(number, None)
    manifest, shard = f"{folder_of(3)}/manifest.json", f"{folder_of(2)}/__0_0.distcp"
    run.write(manifest, run.read(manifest).replace(b'"tokens": 768', b'"tokens": 769'))
    run.write(shard, run.read(shard)[:-1])
    results: list[str] = []
    assert resume(new(), on_warning=results.append) == 1
    assert [line.partition(" ")[0] for line in results] == ["checkpoints/step-00000003", "checkpoints/step-00000002"]
    assert f"{run.address(manifest)} is not as it was written: its crc32c should be " in results[0]
    assert "__0_0.distcp has " in results[1]
    assert [found.step for found in list_complete(run)] == [1]
    assert run.exists("quarantine/step-00000002.1/__0_0.distcp")
    assert resume(new(), on_warning=pytest.fail) == 1
    run.write(f"{folder_of(1)}/__0_0.distcp", b"something else")
    moved = run.address("quarantine")
    for _ in range(2):  # also when it is tried again
        with pytest.raises(DataError, match=rf"would begin at step 0; read why\.txt in each, .* or remove {moved}"):
            resume(new(), on_warning=results.append)
    assert len(results) == 3
    run.remove("quarantine")
    assert resume(last := new(), on_warning=pytest.fail) == 0  # training begins anew
    assert not whole(last)[1].state  # and has counted no step


def misreading(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let this machine read a wrong bit in each file of that name; where it reads a folder, the first time."""
    download, read, differing, seen = BucketStorage.download, LocalStorage.read, documents.crc32c_of, set[str]()

    def downloaded(storage: BucketStorage, path: str, target: Path) -> ObjectInfo:
        stored = download(storage, path, target)
        if path == name:
            flip_a_bit(target)
        return stored

    def flipped(read: Any) -> Any:
        def reads(storage: Storage, path: str, **options: Any) -> bytes:
            content = bytes(read(storage, path, **options))
            if path != name or (storage.local_path() is not None and storage.address() in seen):
                return content
            seen.add(storage.address())
            return content.replace(b'"tokens": ', b'"tokens":  ')

        return reads

    def crc32c(path: Path) -> str:
        first = path.name == name and "resume" not in str(path) and str(path) not in seen
        seen.add(str(path))
        return "00000000" if first else differing(path)

    monkeypatch.setattr(BucketStorage, "download", downloaded)
    monkeypatch.setattr(BucketStorage, "read", flipped(BucketStorage.read))
    monkeypatch.setattr(LocalStorage, "read", flipped(read))
    monkeypatch.setattr(documents, "crc32c_of", crc32c)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_sound_checkpoints_stay_where_a_machine_misreads(
    new_training: NewTraining, root: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each of them would be quarantined, one after the other, and the training begin at step 0."""
    training = new_training("three", root=open_storage(root), keep_last=9)
    with Saver(training, on_result=silent) as saver:
        for number in (1, 2, 3):
            saver.save(number, None)
    with monkeypatch.context() as patch:
        misreading(patch, name)
        with pytest.raises(NodeError, match=r"this machine reads files of .* wrongly: .* run elsewhere"):
            resume(training, on_warning=pytest.fail)
    assert steps_kept(training) == [3, 2, 1]
    assert resume(training, on_warning=pytest.fail) == 3, "another machine goes on"


class Elsewhere(Ranks):
    """The ranks of a training of which another one, on its own machine, reads wrongly what it brings."""

    def gather_then_broadcast(self, action: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        result = super().gather_then_broadcast(action, combine)
        if isinstance(result, list):
            return result
        raise NodeError("this machine reads files of gs://kept/run wrongly")


def test_a_rank_blames_no_machine_but_the_one_that_misreads(new_training: NewTraining) -> None:
    training = new_training()
    with Saver(training, on_result=silent) as saver:
        saver.save(1, None)
    training.__dict__["ranks"] = Elsewhere(rank=0, world_size=1)
    with pytest.raises(NetworkError, match="a rank on another machine has left: this machine reads files of gs"):
        resume(training, on_warning=pytest.fail)
    assert steps_kept(training) == [1]


@dataclass(frozen=True, kw_only=True)
class RanksInThreads(Ranks):
    """The ranks of one training, which are threads of this process."""

    meeting: SimpleNamespace

    def _gather(self, result: object) -> list[Any]:
        self.meeting.results[self.rank] = result
        if self.rank == 0 and self.meeting.first_has_read.is_set():
            self.meeting.first_is_through.set()
        self.meeting.barrier.wait()
        return list(self.meeting.results)

    def _scatter(self, outcomes: list[Any]) -> Any:
        if self.rank == 0:
            self.meeting.results[:] = outcomes
        self.meeting.barrier.wait()
        outcome = self.meeting.results[self.rank]
        self.meeting.barrier.wait()
        return outcome


def test_a_checkpoint_that_one_node_lacks_stays(finished_copy: Path, tmp_path: Path) -> None:
    """A node without the folder that all share finds nothing, however often it reads: the others judge."""
    meeting, trainings = SimpleNamespace(results=[None] * 2, barrier=Barrier(2), first_has_read=Event()), []
    steps = [found.step for found in list_complete(open_storage(str(finished_copy)))]
    for number, root in enumerate([finished_copy, tmp_path / "not mounted"]):
        own = replace(training_of(finished_copy), run=open_storage(str(root)), scratch=tmp_path / f"rank-{number}")
        own.__dict__["ranks"] = RanksInThreads(rank=number, world_size=2, meeting=meeting)
        trainings.append(own)

    def resumed(training: Training) -> object:
        try:
            return resume(training, on_warning=pytest.fail)
        except TrainLitgptError as error:
            return type(error)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(resumed, trainings)] == [NetworkError, NodeError]
    assert [found.step for found in list_complete(open_storage(str(finished_copy)))] == steps


@pytest.mark.parametrize(("nodes", "processes"), [(2, 1), (1, 2), (2, 2)])
def test_no_rank_removes_files_that_another_still_reads(
    finished_copy: Path, bucket: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int, processes: int
) -> None:
    for path in filter(Path.is_file, finished_copy.rglob("*")):
        bucket.upload(path, str(path.relative_to(finished_copy)))
    world = nodes * processes
    meeting = SimpleNamespace(
        results=[None] * world, barrier=Barrier(world), first_has_read=Event(), first_is_through=Event()
    )
    trainings = []
    for number in range(world):
        own = training_of(finished_copy, bucket)
        fabric = SimpleNamespace(local_rank=number % processes, strategy=own.fabric.strategy)
        trainings.append(replace(own, fabric=fabric, scratch=tmp_path / f"rank-{number}"))
        trainings[-1].__dict__["ranks"] = RanksInThreads(rank=number, world_size=world, meeting=meeting)
    load_checkpoint, folders = resuming.load_checkpoint, set()

    def load(model: Any, optimizer: Any, folder: Path, **options: Any) -> Any:
        """Rank 0 reads first; the others begin to read when it has nothing more to do but to wait for them."""
        first = model is trainings[0].model.module
        if not first:
            meeting.first_is_through.wait()
        folders.add(folder)
        saved = load_checkpoint(model, optimizer, folder, **options)
        if first:
            meeting.first_has_read.set()
        return saved

    def resume(training: Training) -> int:
        try:
            return resuming.resume(training, on_warning=pytest.fail)
        except Exception:
            meeting.barrier.abort()
            raise
        finally:
            if training is trainings[0]:  # whoever does not wait for the others is through as well
                meeting.first_is_through.set()

    monkeypatch.setattr(resuming, "load_checkpoint", load)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    with ThreadPoolExecutor(world) as pool:
        assert set(pool.map(resume, trainings)) == {12}
    assert len(folders) == nodes
    assert all(same(whole(trainings[0]), whole(training)) for training in trainings[1:])
    assert list(tmp_path.glob("resume*")) == []


def test_a_bucket_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("litgpt_demo.storage.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gs://kept/logs needs a package: run `pip install google-cloud-storage`"):
        open_storage("gs://kept/logs")
