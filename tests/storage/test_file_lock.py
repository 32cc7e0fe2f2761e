"""The lock of a folder."""

import fcntl

import pytest

from raysim.storage.files import FolderLock, is_locked


def test_folder_lock_is_exclusive_until_released(tmp_path):
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


def test_lock_of_killed_process_is_free(tmp_path):
    (tmp_path / ".lock").touch()
    assert is_locked(tmp_path) is False
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
    assert is_locked(tmp_path) is None


def test_reading_a_lock_does_not_block_owners(tmp_path, monkeypatch):
    (tmp_path / ".lock").touch()
    reader = (tmp_path / ".lock").open()
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr("raysim.storage.files.time.sleep", lambda _: reader.close())
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert is_locked(tmp_path)
    lock.release()


def test_removed_lock_leaves_file_of_next_owner(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    (tmp_path / ".lock").unlink()
    second.acquire()
    first.release()
    assert is_locked(tmp_path)
    second.release()
