"""The lock of a folder."""

import fcntl

import pytest

from raysim.storage.files import FolderLock, is_locked


def test_a_folder_is_locked_by_one_until_it_is_released(tmp_path):
    first, second = FolderLock(tmp_path / "made" / "here"), FolderLock(tmp_path / "made" / "here")
    assert is_locked(first.folder) is None
    first.acquire()
    first.acquire()
    assert is_locked(first.folder)
    with pytest.raises(BlockingIOError):
        second.acquire()
    second.release()  # it holds nothing
    assert is_locked(first.folder)
    first.release()
    assert list(first.folder.iterdir()) == []
    second.acquire()
    second.release()


def test_the_file_of_a_killed_process_is_no_lock(tmp_path):
    (tmp_path / ".lock").touch()
    assert is_locked(tmp_path) is False
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
    assert is_locked(tmp_path) is None


def test_a_reader_who_looks_at_the_lock_keeps_nobody_out(tmp_path, monkeypatch):
    (tmp_path / ".lock").touch()
    reader = (tmp_path / ".lock").open()
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr("raysim.storage.files.time.sleep", lambda _: reader.close())
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert is_locked(tmp_path)
    lock.release()


def test_a_lock_whose_file_was_removed_leaves_the_file_of_the_next_owner(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    (tmp_path / ".lock").unlink()
    second.acquire()
    first.release()
    assert is_locked(tmp_path)
    second.release()
