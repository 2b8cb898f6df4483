"""Data sets of Hugging Face on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from finback.base.runtime import ConfigError
from finback.train.records import Record, SourceConfig, records, texts

TURNS = [{"role": "user", "content": "a cat?"}, {"role": "assistant", "content": "a mat"}]


def source(path: Path, **changes: object) -> SourceConfig:
    return SourceConfig("d", str(path), "huggingface", **changes)  # type: ignore[arg-type]


def read(config: SourceConfig) -> list[Record]:
    return list(records(config))


def test_parquet_arrow_and_saved_data_sets(tmp_path: Path):
    """The files as the library writes them: both kinds of Arrow files, several files in order, `limit` over all of
    them, images as bytes, turns as lists."""
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"text": f"text {i}", "chat": TURNS, "images": [{"bytes": b"png", "path": None}]} for i in range(5)]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "p").mkdir()
    for i, part in enumerate((table.slice(0, 3), table.slice(3))):
        pq.write_table(part, tmp_path / "p" / f"part-{i}.parquet")
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="one").save_to_disk(tmp_path / "saved")
    for name in ("p", "stream.arrow", "file.arrow", "saved"):
        found = read(source(tmp_path / name))
        assert [r.content for r in found] == [row["text"] for row in rows], name
        assert found[0].images == ({"bytes": b"png", "path": None},)
        assert len(read(source(tmp_path / name, limit=4))) == 4
        assert list(texts(source(tmp_path / name, field="chat", limit=1))) == ["a cat?", "a mat"]


def test_splits_and_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A data set with several splits must not be read as one, and what cannot be read says what can."""
    fake = ModuleType("datasets")
    both = {"train": [{"text": "one"}], "test": [{"text": "two"}]}
    fake.load_from_disk = lambda path: both  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert [r.content for r in read(source(tmp_path, split="test"))] == ["two"]
    assert [r.content for r in read(source(tmp_path))] == ["one"]
    with pytest.raises(ConfigError, match=r"no split 'tests' .did you mean 'test'.*train, test"):
        read(source(tmp_path, split="tests"))
    with pytest.raises(ConfigError, match=r"no field 'txt' .did you mean 'text'"):
        read(source(tmp_path, field="txt"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package datasets: pip install 'finback\[datasets\]'"):
        read(source(tmp_path))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"has no \.parquet or \.arrow files; for JSON lines use kind"):
        read(source(tmp_path / "plain"))
