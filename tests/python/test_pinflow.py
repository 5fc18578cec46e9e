"""The Python package on the host. Needs numpy; run with the package on sys.path: python -m unittest test_pinflow"""

import errno
import gc
import importlib.util
import inspect
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import weakref
from collections import deque
from unittest import mock

import numpy as np

import pinflow
from pinflow import _sources

ROWS, WIDTH = 1000, 16


def numbered(rows=ROWS, width=WIDTH):
    """Rows of which each element is the number of the row."""
    return np.repeat(np.arange(rows, dtype=np.int64)[:, None], width, axis=1)


class Folder(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)

    def path(self, name):
        return os.path.join(self._folder.name, name)

    def saved(self, name="rows.npy", array=None):
        path = self.path(name)
        np.save(path, numbered() if array is None else array)
        return path


def run_python(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


class OpenTest(Folder):
    def test_a_file_is_mapped_and_read_only(self):
        array = pinflow.open(self.saved())
        self.assertEqual(array.shape, (ROWS, WIDTH))
        self.assertEqual(array.dtype, np.int64)
        self.assertEqual(array.ndim, 2)
        self.assertEqual(array.nbytes, ROWS * WIDTH * 8)
        self.assertTrue(array.mapped)
        view = np.asarray(array)
        self.assertFalse(view.flags.writeable)
        np.testing.assert_array_equal(view, numbered())
        self.assertTrue(np.shares_memory(view, np.asarray(array)))

    def test_indexing_is_numpys(self):
        path = self.path("packed.npz")
        values = np.random.default_rng(1).integers(0, 100, (50, 4, 3), dtype=np.int32)
        np.savez_compressed(path, a=values, b=values[:2])
        parts = [self.saved(f"part-{i}.npy", values[10 * i:10 * i + 10]) for i in range(5)]
        self.assertEqual(len(parts), 5)
        for array in (pinflow.open(path, "a"), pinflow.open(path + ":a"), pinflow.open(self.saved("one.npy", values)),
                      pinflow.open(self.path("part-*.npy"))):
            for key in (0, -1, slice(3, 20, 4), slice(None, None, -1), (slice(2, 5), 1), (7, 2, 1), [4, 4, 0],
                        np.array([[1, 2], [3, 4]]), (np.array([5, 6]), slice(None), 2), Ellipsis, (Ellipsis, 1), (),
                        ([0, 1], [1, 2]), ([0, 1], slice(None), [1, 2]), np.ix_([1, 2], [0, 3], [1]), (True, 0),
                        np.arange(50) % 3 == 0, values > 50, (None, 2), np.int64(3), np.array(3), [], slice(0, 0),
                        (slice(1, 9, 3), slice(None, None, -1), np.array([2, 0]))):
                np.testing.assert_array_equal(array[key], values[key], err_msg=str(key))
            np.testing.assert_array_equal(np.asarray(array), values)
            for key in (50, -51, ([0, 1], [1, 2, 3]), (0, 4)):
                with self.assertRaises(IndexError):
                    array[key]

    def test_rows_that_are_read_are_indexed_by_anything_that_numpy_takes(self):
        values = np.arange(40.0).reshape(10, 4)
        np.savez_compressed(self.path("small.npz"), x=values)
        np.savez_compressed(self.path("fortran.npz"), x=np.asfortranarray(values))
        parts = [self.saved(f"part{i}.npy", each) for i, each in enumerate(np.array_split(values, 3))]
        keys = [np.int8(3), [True] * 10, np.zeros((0, 2), np.int64), True, None, np.array(True), range(2, 5), [[]],
                np.array([9, 0], np.uint64), np.s_[-2::-3], np.s_[3:100, 1]]
        if importlib.util.find_spec("torch"):
            import torch
            keys += [torch.arange(10) < 1, torch.arange(10) < 0, torch.tensor([2, 3]), torch.tensor([2]), torch.tensor(5),
                     torch.tensor([], dtype=torch.long), (torch.tensor([7, -1]), slice(1, 3))]
        for array in (pinflow.concatenate(parts), pinflow.open(self.path("small.npz"), "x"),
                      pinflow.open(self.path("fortran.npz"), "x")):
            for key in keys:
                np.testing.assert_array_equal(array[key], values[key], str(key))
                self.assertEqual(array[key].shape, values[key].shape, str(key))
            for key in (10, -11, [3, 10], np.array([-11]), [True] * 9, 1.5, 2**70):
                with self.assertRaises(IndexError, msg=str(key)):
                    array[key]

    def test_an_index_reads_the_rows_that_it_chooses_only(self):
        read = []

        class Rows:
            dtype, shape = "float32", (10**9, 3)

            def read_rows(self, ids, out):
                read.extend(ids)

        array = pinflow.concatenate([Rows()])
        for key, chosen in ((5, [5]), (-1, [10**9 - 1]), (slice(2, 9, 3), [2, 5, 8]), ([7, 7], [7, 7]), ([], []),
                            (range(3), [0, 1, 2]), (np.array([[1], [-10**9]]), [1, 0])):
            read.clear()
            array[key]
            self.assertEqual(read, chosen)
        with self.assertRaises(IndexError):
            array[10**9]

    def test_messages_show_wrong_values_on_one_line(self):
        wrong = np.arange(60.0).reshape(10, 6)
        for call in (lambda: pinflow.Loader(np.zeros(3), batch=wrong), lambda: pinflow.Loader(np.zeros(3), route=wrong),
                     lambda: pinflow.load_file("x", threads=wrong), lambda: pinflow.load_file("x", framework=wrong)):
            with self.assertRaises(pinflow.InvalidArgument) as raised:
                call()
            self.assertNotIn("\n", str(raised.exception))
            self.assertLess(len(str(raised.exception)), 200)

    def test_kinds_of_elements(self):
        for dtype in ("b1", "i1", ">i4", "f2", "f8", "c16", "M8[ns]", "S5", "U3"):
            values = np.zeros(4, dtype)
            np.testing.assert_array_equal(np.asarray(pinflow.open(self.saved(f"{dtype[1:3]}.npy", values))), values)
        pairs = np.zeros(3, [("a", "<i4"), ("b", "<f8", (2,)), ("c", [("d", "u1")])])
        pairs["a"] = [1, 2, 3]
        back = np.asarray(pinflow.open(self.saved("pairs.npy", pairs)))
        self.assertEqual(back.dtype, pairs.dtype)
        np.testing.assert_array_equal(back, pairs)

    def test_boxes_of_a_chunked_dataset_are_read_without_the_rest(self):
        for dtype in ("<f4", ">i2"):
            values = np.random.default_rng(5).integers(0, 99, (300, 70, 60)).astype(dtype)
            np.save(self.path("a.npy"), values)
            pinflow.convert(self.path("a.npy"), self.path("a.h5"), "--deflate", "1")
            array = pinflow.open(self.path("a.h5"), "data")
            for key in (np.s_[:, 7], np.s_[3, 10:20, 5:9], np.s_[5:250, :, -1], np.s_[..., 2:50:3], np.s_[1, 2, 3],
                        np.s_[::7, 3:5], np.s_[::2, 4], np.s_[::-1, 3, 5], np.s_[::150, 1:69], np.s_[4:4, 1:3],
                        np.s_[-1, ::-1, 3], np.s_[[1, 5], 3:6], np.s_[9:2:-2, 0]):
                with self.subTest((dtype, key)):
                    np.testing.assert_array_equal(array[key], values[key])
                    self.assertEqual(np.shape(array[key]), values[key].shape)
                    self.assertEqual(array[key].dtype.newbyteorder("="), values.dtype.newbyteorder("="))
            with self.assertRaises(IndexError):
                array[0, 70]
            folder = os.getcwd()
            self.addCleanup(os.chdir, folder)
            os.chdir(self._folder.name)
            relative = pinflow.open("a.h5", "data")
            os.chdir(folder)
            np.testing.assert_array_equal(relative[:, 7], values[:, 7])
            np.testing.assert_array_equal(np.asarray(relative), values)
            before = os.path.getsize(self.path("a.h5"))
            np.save(self.path("a.npy"), values[:, 1:])
            pinflow.convert(self.path("a.npy"), self.path("b.h5"), "--deflate", "1")
            shutil.copyfile(self.path("b.h5"), self.path("a.h5"))
            self.assertNotEqual(before, os.path.getsize(self.path("a.h5")))
            with self.assertRaises(pinflow.DataChanged):
                array[:, 7]
            relative = pinflow.open(self.path("b.h5"), "data")
            os.remove(self.path("b.h5"))
            np.testing.assert_array_equal(relative[3, 2:9], values[:, 1:][3, 2:9])  # from the rows, which are open

    def test_rows_have_the_byte_order_of_the_array(self):
        numbers = np.arange(24).reshape(4, 3, 2)
        fields = np.zeros(4, [("a", ">i4"), ("b", "<f8", (2,)), ("c", [("d", ">u2")])])
        fields["a"], fields["c"]["d"] = [1, 2, 3, 4], [5, 6, 7, 8]
        for values in (numbers.astype(">i2"), numbers.astype(">f8"), numbers.astype(">c16"), fields):
            np.savez(self.path("big.npz"), x=values)
            np.savez_compressed(self.path("small.npz"), x=values)
            for name in (self.saved("big.npy", values), self.path("big.npz"), self.path("small.npz")):
                array = pinflow.open(name)
                for rows, expected in ((array.rows([3, 1]), values[[3, 1]]), (array[1:3], values[1:3]),
                                       (array[2], values[2]), (array[[0, 0]], values[[0, 0]])):
                    self.assertEqual(rows.dtype, values.dtype, name)
                    np.testing.assert_array_equal(rows, expected, name)

    def test_errors_have_the_classes_that_users_catch(self):
        with self.assertRaises(FileNotFoundError) as raised:
            pinflow.open(self.path("none.npy"))
        self.assertIsInstance(raised.exception, pinflow.NotFound)
        self.assertIn("none.npy", str(raised.exception))
        with open(self.path("bad.npy"), "wb") as file:
            file.write(b"\x93NUMPY\x01\x00")
        with self.assertRaises(ValueError) as raised:
            pinflow.open(self.path("bad.npy"))
        self.assertIsInstance(raised.exception, pinflow.FormatError)
        np.savez(self.path("two.npz"), a=np.zeros(1), b=np.zeros(1))
        with self.assertRaises(pinflow.InvalidArgument):
            pinflow.open(self.path("two.npz"))
        with self.assertRaises(BufferError):
            pinflow.open(self.saved("times.npy", np.zeros(2, "M8[s]"))).__dlpack__()

    def test_list_and_save(self):
        np.savez(self.path("two.npz"), a=np.zeros((2, 3), np.float32), b=np.zeros(1))
        self.assertEqual([(each["name"], each["dtype"], each["shape"]) for each in pinflow.list(self.path("two.npz"))],
                         [("a", "<f4", (2, 3)), ("b", "<f8", (1,))])
        for values in (numbered(), np.zeros((0, 3)), np.array(5.0), np.zeros(3, "M8[s]"), numbered().T):
            pinflow.save(self.path("saved.npy"), values)
            back = np.load(self.path("saved.npy"))
            self.assertEqual((back.dtype, back.shape), (values.dtype, values.shape))
            np.testing.assert_array_equal(back, values)
        for name, values in (("saved.npy", np.array([object()])), ("saved.npz", numbered())):
            with self.assertRaises(ValueError):
                pinflow.save(self.path(name), values)

    def test_names_that_are_not_utf8(self):
        path = self.path(os.fsdecode(b"caf\xe9.npy"))
        pinflow.save(path, numbered())
        opened = pinflow.open(os.fsencode(path))
        self.assertEqual(opened.label, path)
        np.testing.assert_array_equal(opened, numbered())
        self.assertEqual(pinflow.list(path)[0]["shape"], (ROWS, WIDTH))
        loader = pinflow.Loader(path, device="host")
        self.assertEqual(sum(len(rows) for (rows,) in loader), ROWS)
        self.assertIn("caf\\xe9.npy", loader.report().values["arrays"][0]["name"])
        self.assertTrue(opened.reason)
        pinflow.convert(path, self.path("b.npz"))
        with self.assertRaises(pinflow.NotFound) as raised:
            pinflow.open(self.path(os.fsdecode(b"no\xe9.npy")))
        self.assertIn("no\\xe9.npy", str(raised.exception))

    def test_a_masked_array_is_refused(self):
        masked = np.ma.masked_equal(numbered(), 3)
        for function in (pinflow.Loader, pinflow.RowTable, lambda array: pinflow.save(self.path("m.npy"), array)):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "filled"):
                function(masked)

    def test_concatenate_and_stack(self):
        first, second = numbered(3), numbered(3) + 10
        np.testing.assert_array_equal(np.asarray(pinflow.concatenate([first, second])), np.concatenate([first, second]))
        np.testing.assert_array_equal(np.asarray(pinflow.stack([first, second])), np.stack([first, second]))
        with self.assertRaises(ValueError):
            pinflow.concatenate([first, second.astype(np.int32)])

    def test_from_dlpack(self):
        array = pinflow.open(self.saved())
        if np.lib.NumpyVersion(np.__version__) < "2.1.0":
            with self.assertRaises(BufferError):  # older numpy asks for a structure that cannot say read-only
                np.from_dlpack(array)
        else:
            view = np.from_dlpack(array)
            self.assertFalse(view.flags.writeable)
            np.testing.assert_array_equal(view, numbered())

    def test_a_compressed_member_of_a_replaced_file_is_an_error(self):
        path, other = self.path("q.npz"), self.path("other.npz")
        first = np.ones((1000, 4), "f4")
        uses = [lambda array: array.rows([0]), np.asarray, lambda array: array[3],
                lambda array: pinflow.RowTable(array, device="cpu").gather(np.arange(100)),
                lambda array: next(iter(pinflow.Loader(array, device="cpu")))]
        for changed in (first.astype("i4"), first.astype("f8"), first[:10], first + 1):
            for use in uses:
                np.savez_compressed(path, x=first)
                array = pinflow.open(path)
                np.savez_compressed(other, x=changed)
                os.replace(other, path)
                with self.assertRaisesRegex(pinflow.DataChanged, "replaced"):
                    use(array)

    def test_rows_of_a_truncated_file_are_an_error_not_zeros(self):
        for kept in (200, 16_000):
            path = self.saved("t.npy", np.ones((1000, 4), "f4"))
            array = pinflow.open(path)
            os.truncate(path, kept)
            with self.assertRaises(pinflow.DataChanged):
                array.rows([5, 6])

    def test_rows_of_changing_numbers_are_refused(self):
        array = pinflow.open(self.saved("r.npy", np.arange(100.0)))
        ids = np.zeros(1 << 16, np.uint64)
        ended = threading.Event()

        def change():
            while not ended.is_set():
                ids[-1] = 1 << 40
                ids[-1] = 0

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for _ in range(200):
                try:
                    self.assertEqual(array.rows(ids)[-1], 0)
                except pinflow.InvalidArgument:
                    pass  # the number was out of range when it was copied
        finally:
            ended.set()
            thread.join()


class LoaderTest(Folder):
    def test_wrong_arguments_of_dlpack_are_refused_with_a_sentence(self):
        (rows,) = next(iter(pinflow.Loader(numbered(), device="host")))
        for wrong in ({"stream": "x"}, {"stream": 1.5}, {"stream": 2**70}, {"max_version": "x"}, {"max_version": ()}):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "__dlpack__"):
                rows.__dlpack__(**wrong)
        for copy in (1, True, np.bool_(True)):
            with self.assertRaises(pinflow.Unsupported):
                rows.__dlpack__(copy=copy)
        rows.__dlpack__(copy=np.bool_(False), dl_device=[1, 0], max_version=[1, 0])

    def test_pytorch_takes_views_of_a_mapped_file(self):
        if importlib.util.find_spec("torch") is None:
            self.skipTest("needs PyTorch")
        loader = pinflow.Loader(self.saved(), batch=100, device="host", route="direct", order="sequential")
        (rows,) = next(iter(loader))
        np.testing.assert_array_equal(rows.torch().numpy(), numbered()[:100])

    def test_each_loop_is_one_epoch_with_every_row_once(self):
        labels = np.arange(ROWS, dtype=np.int32)
        loader = pinflow.Loader(self.saved(), labels, batch=64, device="host", seed=3)
        self.assertEqual(len(loader), 16)
        orders = []
        for _ in range(3):
            order = []
            for images, numbers in loader:
                rows = images.numpy()
                np.testing.assert_array_equal(rows[:, 0], numbers.numpy())
                self.assertTrue((rows == rows[:, :1]).all())
                order.extend(numbers.numpy().tolist())
            self.assertEqual(sorted(order), list(range(ROWS)))
            orders.append(order)
        self.assertNotEqual(orders[0], orders[1])
        again = pinflow.Loader(labels, batch=64, device="host", seed=3)
        self.assertEqual([x for (part,) in again for x in part.numpy().tolist()], orders[0])

    def test_break_ends_the_epoch(self):
        loader = pinflow.Loader(numbered(), batch=100, device="host", order="sequential", epochs=3)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        batches = list(loader.batches())
        self.assertEqual([batch.epoch for batch in batches], [1] * 10)
        self.assertEqual([batch.index for batch in batches], list(range(10)))
        del batches
        self.assertEqual(sum(1 for _ in loader), 10)
        self.assertEqual(sum(1 for _ in loader), 0)  # three epochs are over

    def test_batches_know_their_rows(self):
        loader = pinflow.Loader(numbered(), batch=64, device="host")
        for batch in loader.batches():
            with batch:
                np.testing.assert_array_equal(batch.row_ids, batch[0].numpy()[:, 0])
                self.assertEqual(len(batch), len(batch.row_ids))
            with self.assertRaises(pinflow.InvalidArgument):
                len(batch)

    def test_a_batch_unpacks(self):
        loader = pinflow.Loader(numbered(), np.arange(ROWS), batch=64, device="host")
        for batch in loader.batches():
            rows, numbers = batch
            np.testing.assert_array_equal(rows.numpy()[:, 0], numbers.numpy())
        loader.close()
        self.assertEqual(len(loader), 16)
        self.assertEqual(loader.report().values["rows"], ROWS)
        with self.assertRaises(ValueError):
            next(iter(loader))

    def test_closing_or_loading_in_the_last_batch_ends_the_loop(self):
        loader = pinflow.Loader(numbered(), batch=500, device="host")
        state = loader.state_dict()
        for number, _ in enumerate(loader):
            if number == 1:
                loader.load_state_dict(state)
        self.assertEqual(loader.epoch, 0)
        for number, _ in enumerate(loader):
            if number == 1:
                loader.close()

    def test_no_batch_is_lost_if_kept_tensors_hold_all_slots(self):
        loader = pinflow.Loader(numbered(), batch=100, device="host", order="sequential", slots=2)
        loop = iter(loader)
        kept = [next(loop), next(loop)]
        with self.assertRaises(pinflow.AllSlotsLeased):
            next(loop)
        kept.clear()
        (rows,) = next(loop)
        self.assertEqual(int(rows.numpy()[0, 0]), 200)

    def test_orders_of_ones_own(self):
        rows = [5, 5, 999, 0]
        loader = pinflow.Loader(numbered(), batch=3, device="host", order=rows)
        self.assertEqual([x for (part,) in loader for x in part.numpy()[:, 0].tolist()], rows)

        class Backwards:
            name = "backwards/1"
            position_count = ROWS

            def rows_at(self, epoch, first, out):
                for i in range(len(out)):
                    out[i] = ROWS - 1 - (first + i)

        loader = pinflow.Loader(numbered(), batch=64, device="host", order=Backwards())
        self.assertEqual([x for (part,) in loader for x in part.numpy()[:, 0].tolist()], list(range(ROWS))[::-1])
        for wrong in ([-1], [ROWS], ["a"], "random", np.zeros((2, 2), int)):
            with self.assertRaises(ValueError):
                pinflow.Loader(numbered(), device="host", order=wrong)

    def test_wrong_arguments_are_named(self):
        for arguments in ({"batch": 0}, {"batch": 1.5}, {"batch": -1}, {"batch": None}, {"seed": -1}, {"memory": "1G"},
                          {"device": "gpu"}, {"tail": "keep"}, {"route": "fast"}, {"device": None}, {"epochs": True}):
            with self.assertRaises(ValueError) as raised:
                pinflow.Loader(numbered(), **{"device": "host", **arguments})
            (name, value), = arguments.items()
            self.assertIn(name, str(raised.exception))
            self.assertIn(str(value), str(raised.exception))
        for sources in ((), ([1, 2],), ((numbered(), numbered()),), ({"x": numbered()},), (object(),), (numbered(), 5)):
            with self.assertRaises((ValueError, pinflow.Unsupported)):
                pinflow.Loader(*sources, device="host")
        with self.assertRaises(ValueError) as raised:
            pinflow.Loader(numbered(), numbered(3), device="host")
        self.assertIn("source 1", str(raised.exception))

    def test_one_loop_at_a_time(self):
        loader = pinflow.Loader(numbered(), batch=100, device="host", order="sequential")
        first = iter(loader)
        next(first)
        self.assertEqual(sum(1 for _ in loader), 10)
        with self.assertRaises(pinflow.Error) as raised:
            next(first)
        self.assertIn("another loop", str(raised.exception))
        self.assertEqual(loader.epoch, 2)
        second = iter(loader)
        next(second)
        loader.load_state_dict(loader.state_dict())
        with self.assertRaises(pinflow.Error):
            next(second)
        self.assertEqual((loader.epoch, sum(1 for _ in loader)), (2, 9))
        with self.assertRaises(ValueError):
            for _ in loader:
                raise ValueError("in the body")
        self.assertEqual(sum(1 for _ in loader), 10)

    def test_ranks_share_an_epoch(self):
        seen = []
        for rank in range(3):
            loader = pinflow.Loader(numbered(), batch=32, device="host", rank=rank, world=3)
            for _ in range(2):
                part = [x for (rows,) in loader for x in rows.numpy()[:, 0].tolist()]
            seen.extend(part)
        self.assertEqual(sorted(seen), list(range(ROWS)))
        with self.assertRaises(ValueError):
            pinflow.Loader(numbered(), device="host", rank=1)

    def test_a_state_resumes_exactly_the_rows_that_were_not_delivered(self):
        path = self.saved()
        loader = pinflow.Loader(path, batch=32, device="host", seed=5)
        for _ in loader:
            pass
        delivered = []
        for number, (rows,) in enumerate(loader):
            delivered.extend(rows.numpy()[:, 0].tolist())
            if number == 6:
                state = json.loads(json.dumps(loader.state_dict()))
                break
        rest = []
        for rank in range(2):
            resumed = pinflow.Loader(path, batch=50, device="host", seed=5, rank=rank, world=2)
            resumed.load_state_dict(state)
            rest.extend(x for (rows,) in resumed for x in rows.numpy()[:, 0].tolist())
        self.assertEqual(sorted(delivered + rest), list(range(ROWS)))
        with self.assertRaises(pinflow.StateMismatch):
            pinflow.Loader(path, device="host", seed=6).load_state_dict(state)
        code = ("import sys, json, pinflow\n"
                "loader = pinflow.Loader(sys.argv[1], batch=7, device='host', seed=5)\n"
                "loader.load_state_dict(json.loads(sys.argv[2]))\n"
                "print(sum(len(rows) for (rows,) in loader))")
        done = run_python(code, path, json.dumps(state))
        self.assertEqual((done.returncode, done.stdout.strip()), (0, str(len(rest))), done.stderr)

    def test_states_around_the_end_of_an_epoch(self):
        loader = pinflow.Loader(numbered(), batch=100, device="host", order="sequential")
        self.assertEqual((loader.state_dict()["epoch"], loader.state_dict()["position"]), (0, 0))
        for _ in loader:
            pass
        state = loader.state_dict()
        self.assertEqual((state["epoch"], state["position"]), (1, 0))
        other = pinflow.Loader(numbered(), batch=100, device="host", order="sequential")
        other.load_state_dict(state)
        self.assertEqual({batch.epoch for batch in other.batches()}, {1})
        self.assertEqual({batch.epoch for batch in other.batches()}, {2})

    def test_the_state_after_an_error_of_a_file_stays(self):
        path = self.path("cut.npy")
        pinflow.save(path, numbered(2000, 4096))
        loader = pinflow.Loader(path, batch=10, device="host", order="sequential")
        loop = iter(loader)
        next(loop)
        was = os.stat(path)
        os.truncate(path, 1 << 20)
        with self.assertRaises(pinflow.DataChanged):
            for _ in range(250):
                next(loop)
        with self.assertRaises(StopIteration):
            next(loop)
        os.truncate(path, was.st_size)  # the same file again, as far as one can tell
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        state = loader.state_dict()
        self.assertEqual(state["epoch"], 0)
        self.assertGreater(state["position"], 0)

    def test_the_state_after_a_wrong_row_of_an_order_stays(self):
        class Wrong:
            name = "wrong/1"
            position_count = ROWS

            def rows_at(self, epoch, first, out):
                for i in range(len(out)):
                    out[i] = first + i if first + i < 300 else ROWS

        loader = pinflow.Loader(numbered(), batch=50, device="host", order=Wrong())
        loop = iter(loader)
        with self.assertRaises(pinflow.InvalidArgument):
            for _ in range(ROWS):
                next(loop)
        state = loader.state_dict()
        self.assertEqual(state["epoch"], 0)
        with self.assertRaises(StopIteration):
            next(loop)
        self.assertEqual(loader.state_dict(), state)

    def test_states_are_those_of_all_ranks(self):
        def ended(rank):
            loader = pinflow.Loader(numbered(92), batch=10, device="host", order="sequential", rank=rank, world=3)
            states = [(s["epoch"], s["position"]) for s in (loader.state_dict() for _ in loader)]
            return states, (loader.state_dict()["epoch"], loader.state_dict()["position"])

        for rank in range(3):
            states, after = ended(rank)
            self.assertEqual(states[:3], [(0, 30), (0, 60), (0, 90)])
            self.assertEqual(after, (1, 0))
        for rank in range(3):  # a rank without any batch is no exception
            loader = pinflow.Loader(numbered(1), batch=10, device="host", rank=rank, world=3)
            self.assertLessEqual(sum(1 for _ in loader), 1)
            self.assertEqual((loader.state_dict()["epoch"], loader.state_dict()["position"]), (1, 0))

    def test_a_rank_without_rows_in_a_whole_epoch_may_have_some_in_the_rest_of_one(self):
        order = list(pinflow.Loader(numbered(3), batch=1, device="host", seed=1).batches())
        expected = sorted(int(batch.row_ids[0]) for batch in order[1:])
        for world in (2, 5, 6, 9):
            first = pinflow.Loader(numbered(3), batch=1, device="host", seed=1)
            next(iter(first))
            rest, following = [], []
            for rank in range(world):
                resumed = pinflow.Loader(numbered(3), batch=1, device="host", seed=1, rank=rank, world=world)
                resumed.load_state_dict(first.state_dict())
                rest.extend(int(batch.row_ids[0]) for batch in resumed.batches())
                following.extend(int(batch.row_ids[0]) for batch in resumed.batches())
            self.assertEqual(sorted(rest), expected, world)
            self.assertEqual(sorted(following), [0, 1, 2], world)

    def test_a_batch_that_was_taken_ahead_has_its_own_state(self):
        path = self.saved()
        loader = pinflow.Loader(path, batch=64, device="host")
        loop = loader.batches()
        first, second = next(loop), next(loop)
        expected = second.row_ids.copy()
        other = pinflow.Loader(path, batch=64, device="host")
        other.load_state_dict(json.loads(json.dumps(first.state_dict())))
        np.testing.assert_array_equal(next(other.batches()).row_ids, expected)
        first.release()
        for use in (first.state_dict, lambda: first.used_on(1)):
            with self.assertRaises(pinflow.InvalidArgument):
                use()

    def test_a_state_that_is_refused_changes_nothing(self):
        loader = pinflow.Loader(numbered(), batch=100, device="host", order="sequential")
        loop = iter(loader)
        next(loop)
        wrong = pinflow.Loader(numbered(), device="host", seed=3).state_dict()
        for state in (wrong, {}):
            with self.assertRaises(pinflow.Error):
                loader.load_state_dict(state)
        self.assertEqual(sum(1 for _ in loop), 9)

    def test_tensors_keep_their_rows_wherever_they_are_dropped(self):
        loader = pinflow.Loader(self.saved(), batch=10, device="host", slots=6)
        kept = deque()
        count = 0
        for _ in range(10):
            for batch in loader.batches():
                kept.append((batch[0].numpy(), batch.row_ids))
                del batch
                count += 1
                if len(kept) > 3:
                    np.testing.assert_array_equal(kept[0][0][:, 0], kept[0][1])
                    if count % 5 == 0:
                        last = [kept.popleft()]
                        thread = threading.Thread(target=last.clear)
                        thread.start()
                        thread.join()
                    else:
                        kept.popleft()
        self.assertEqual(count, 1000)
        loader.close()
        del loader
        gc.collect()
        for rows, ids in kept:
            np.testing.assert_array_equal(rows[:, 0], ids)

    def test_too_many_kept_tensors_are_an_error_that_says_so(self):
        loader = pinflow.Loader(self.saved(), batch=10, device="host", slots=2)
        with self.assertRaises(pinflow.AllSlotsLeased):
            kept = [rows for (rows,) in loader]
            del kept

    def test_a_report_says_what_was_the_limit(self):
        loader = pinflow.Loader(self.saved(), device="host")
        for _ in loader:
            pass
        self.assertRegex(str(loader.report()), "is the limit|nothing stands out")
        self.assertEqual(loader.report().values["rows"], ROWS)
        self.assertEqual(len(loader.report().values["arrays"]), 1)

    def test_starting_and_stopping_leaves_nothing(self):
        def rss():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

        path = self.saved()

        def start_and_stop(times):
            for _ in range(times):
                for _ in pinflow.Loader(path, batch=64, device="host"):
                    break

        start_and_stop(50)
        before = rss()
        start_and_stop(300)
        self.assertLess(rss() - before, 8 * 1024)


class SourceTest(Folder):
    class Squares:
        dtype = "<i8"
        shape = (ROWS, 3)

        def read_rows(self, ids, out):
            rows = np.frombuffer(out, np.int64).reshape(-1, 3)
            rows[:] = (np.frombuffer(ids, np.uint64).astype(np.int64) ** 2)[:, None]

    def test_rows_of_a_python_object(self):
        loader = pinflow.Loader(self.Squares(), np.arange(ROWS), batch=64, device="host")
        for squares, numbers in loader:
            np.testing.assert_array_equal(squares.numpy(), (numbers.numpy() ** 2)[:, None].repeat(3, 1))
        np.testing.assert_array_equal(np.asarray(pinflow.concatenate([self.Squares()]))[:, 0], np.arange(ROWS) ** 2)

    def test_closing_a_loader_of_python_rows_waits_for_the_call_in_progress_only(self):
        class Rows:
            dtype, shape = "float32", (1000, 3)

            def __init__(self):
                self.calls, self.began, self.is_closing = 0, threading.Event(), threading.Event()

            def read_rows(self, ids, out):
                self.calls += 1
                self.began.set()
                self.is_closing.wait(30)
                time.sleep(0.1)  # close stops the loader meanwhile: if not, there are more calls in this attempt

        def calls_of_an_attempt():
            rows = Rows()
            loader = pinflow.Loader(rows, batch=10, device="host", threads=8)
            errors = []

            def take():
                try:
                    next(iter(loader))
                except pinflow.Error as error:
                    errors.append(error)

            taking = threading.Thread(target=take)
            taking.start()
            self.assertTrue(rows.began.wait(30))
            time.sleep(0.1)  # the other threads come to wait for this call
            rows.is_closing.set()
            loader.close()
            taking.join()
            self.assertEqual(len(errors), 1)
            return rows.calls

        self.assertIn(1, (calls_of_an_attempt() for _ in range(5)))

    def test_a_loader_of_python_rows_has_8_slots_even_if_they_are_concatenated(self):
        parts = pinflow.concatenate([self.Squares(), self.Squares()])
        for source in (self.Squares(), parts, pinflow.stack([parts])):
            loader = pinflow.Loader(source, batch=1, device="host")
            self.assertEqual(loader.report().values["slots"], 8)

    def test_a_tensor_of_another_type_is_a_copy_which_numpy_may_forbid(self):
        ((rows,),) = pinflow.Loader(np.arange(4), batch=4, device="host", order="sequential", epochs=1)
        np.testing.assert_array_equal(rows.__array__(np.float64), np.arange(4.0))
        with self.assertRaises(ValueError):
            rows.__array__(np.float64, copy=False)

    def test_types_and_mistakes_of_sources(self):
        for dtype in (np.dtype("int64"), np.int64, "int64", "<i8"):
            source = self.Squares()
            source.dtype = dtype
            self.assertEqual(sum(len(rows) for (rows,) in pinflow.Loader(source, device="host")), ROWS)
        for attribute, value in (("shape", 100), ("shape", ()), ("shape", (-1, 3)), ("dtype", ">i8")):
            source = self.Squares()
            setattr(source, attribute, value)
            with self.assertRaises(ValueError):
                pinflow.Loader(source, device="host")

        class Returns(self.Squares):
            def read_rows(self, ids, out):
                return np.zeros((len(ids), 3))

        with self.assertRaises(pinflow.InvalidArgument) as raised:
            list(pinflow.Loader(Returns(), device="host"))
        self.assertIn("returns None", str(raised.exception))

    def test_rows_that_differ_each_time_can_be_left_at_any_point(self):
        class Random(self.Squares):
            def read_rows(self, ids, out):
                np.frombuffer(out, np.int64)[:] = np.random.randint(0, 100, 3 * len(ids))

        loader = pinflow.Loader(Random(), batch=10, device="host")
        for epoch in range(3):
            self.assertEqual(loader.epoch, epoch)
            for _ in loader:
                break
        self.assertEqual(sum(len(rows) for (rows,) in loader), ROWS)

    def test_what_a_source_keeps_of_its_memory_stays_valid(self):
        kept = []

        class Keeps(self.Squares):
            def read_rows(self, ids, out):
                super().read_rows(ids, out)
                kept.append((out[:], np.frombuffer(ids, np.uint64)))

        for (rows,) in pinflow.Loader(Keeps(), batch=10, device="host", slots=2):
            rows.numpy()[:] = -1
        gc.collect()
        for out, ids in kept:
            np.testing.assert_array_equal(np.frombuffer(out, np.int64)[::3], ids.astype(np.int64) ** 2)

    def test_its_exception_reaches_the_loop(self):
        class Broken(self.Squares):
            def read_rows(self, ids, out):
                raise KeyError("no such sample")

        with self.assertRaises(KeyError) as raised:
            for _ in pinflow.Loader(Broken(), device="host"):
                pass
        self.assertEqual(raised.exception.args, ("no such sample",))

    def test_a_signal_ends_the_wait_for_a_batch_and_loses_none(self):
        may_read = threading.Event()

        class Waits(self.Squares):
            def read_rows(self, ids, out):
                may_read.wait()
                super().read_rows(ids, out)

        def interrupt(number, frame):
            raise KeyboardInterrupt

        loader = pinflow.Loader(Waits(), batch=10, device="host")
        loop = iter(loader)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with self.assertRaises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                next(loop)
        finally:
            signal.signal(signal.SIGALRM, before)
            may_read.set()
        self.assertEqual(sum(len(rows) for (rows,) in loop), ROWS)

    def test_a_signal_handler_may_close_the_loader_that_is_waited_for(self):
        may_read = threading.Event()

        class Waits(self.Squares):
            def read_rows(self, ids, out):
                may_read.wait()

        loader = pinflow.Loader(Waits(), batch=10, device="host")

        def close(number, frame):
            may_read.set()
            loader.close()

        before = signal.signal(signal.SIGALRM, close)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            self.assertLess(sum(len(rows) for (rows,) in loader), ROWS)
        except pinflow.Error:
            pass  # the loop was told that its loader is closed
        finally:
            signal.signal(signal.SIGALRM, before)
        self.assertRaises(pinflow.InvalidArgument, next, iter(loader))

    def test_a_loop_that_a_signal_handler_has_replaced_raises_error(self):
        for replace in ("loop", "state"):
            has_begun = threading.Event()

            class Signals(self.Squares):
                calls = 0

                def read_rows(self, ids, out):
                    self.calls += 1
                    if self.calls == 3 and not has_begun.is_set():
                        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
                        has_begun.wait(60)
                    super().read_rows(ids, out)

            loader = pinflow.Loader(Signals(), batch=10, device="host", threads=1, slots=2)
            state = pinflow.Loader(self.Squares(), batch=10, device="host").state_dict()

            def begin(number, frame):
                has_begun.set()
                if replace == "loop":
                    next(loader.batches())
                else:
                    loader.load_state_dict(state)

            before = signal.signal(signal.SIGALRM, begin)
            try:
                with self.subTest(replace), self.assertRaisesRegex(pinflow.Error, "cannot go on"):
                    for batch in loader.batches():
                        batch.release()
            finally:
                signal.signal(signal.SIGALRM, before)

    def test_a_loop_that_does_not_begin_leaves_the_loader_as_it_was(self):
        loader = pinflow.Loader(numbered(), batch=10, device="host", order="sequential")
        for failure in (KeyboardInterrupt, MemoryError):
            with self.subTest(failure):
                next(iter(loader))
                epoch = loader.epoch
                with mock.patch.object(pinflow._native, "make_loader", side_effect=failure):
                    self.assertRaises(failure, next, iter(loader))
                    self.assertRaises(failure, loader.state_dict)
                    self.assertRaises(failure, next, iter(loader))
                self.assertTrue(str(loader.report()))
                state = loader.state_dict()
                self.assertEqual((state["epoch"], state["position"], loader.epoch), (epoch, 0, epoch))
                rows = np.concatenate([rows.numpy()[:, 0].copy() for (rows,) in loader])
                np.testing.assert_array_equal(rows, np.arange(ROWS))
                self.assertEqual(loader.epoch, epoch + 1)
        next(iter(loader))
        with mock.patch.object(pinflow._native, "make_loader", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, next, iter(loader))
        loader.close()
        self.assertRaises(pinflow.InvalidArgument, next, iter(loader))

    def test_a_state_whose_load_is_interrupted_leaves_a_loader_that_goes_on(self):
        loader = pinflow.Loader(numbered(), batch=10, device="host", order="sequential")
        state = {**loader.state_dict(), "epoch": 3, "position": 50}
        loader._loader.close()
        loader._loader = mock.Mock(close=mock.Mock(side_effect=[KeyboardInterrupt, None, None]))
        self.assertRaises(KeyboardInterrupt, loader.load_state_dict, state)
        self.assertEqual(loader.state_dict()["epoch"], loader.epoch)
        self.assertEqual(sum(len(rows) for (rows,) in loader), ROWS)
        loader.load_state_dict(state)
        self.assertEqual(sum(len(rows) for (rows,) in loader), ROWS - 50)
        self.assertEqual(loader.epoch, 4)
        loader.close()
        loader.close()

    def test_a_cycle_with_its_loader_is_collected(self):
        source = self.Squares()
        source.loader = pinflow.Loader(source, batch=10, device="host")
        next(iter(source.loader))
        watched = weakref.ref(source)
        del source
        for _ in range(100):
            gc.collect()
            if watched() is None:
                break
            time.sleep(0.01)  # what other threads release is dropped later, in a pending call of the interpreter
        self.assertIsNone(watched())

    def test_python_ends_while_a_loader_reads(self):
        code = ("import numpy as np, pinflow, time\n"
                "class Slow:\n"
                "    dtype, shape = '<i8', (1000, 3)\n"
                "    def read_rows(self, ids, out): time.sleep(0.01)\n"
                "loader = pinflow.Loader(Slow(), batch=4, device='host')\n"
                "kept = [next(iter(loader))]\n"
                "print('done')")
        done = run_python(code)
        self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)

    def assert_ends(self, code, times):
        for _ in range(times):
            done = run_python(code)
            self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)

    def test_python_ends_while_another_thread_is_in_a_loop(self):
        code = ("import numpy as np, pinflow, threading, time\n"
                "class Slow:\n"
                "    dtype, shape = '<i8', (1000, 3)\n"
                "    def read_rows(self, ids, out): time.sleep(0.001)\n"
                "loader = pinflow.Loader(Slow(), batch=4, device='host')\n"
                "def forever():\n"
                "    while True:\n"
                "        for rows in loader: pass\n"
                "threading.Thread(target=forever, daemon=True).start()\n"
                "time.sleep(0.2)\n"
                "print('done')")
        self.assert_ends(code, times=3)

    def test_python_ends_while_a_daemon_thread_makes_loaders(self):
        code = ("import sys, threading, time, numpy as np, pinflow\n"
                "rows = np.zeros((1000, 4))\n"
                "def forever():\n"
                "    while True:\n"
                "        for (x,) in pinflow.Loader(rows, batch=20, device='host'): len(x)\n"
                "threading.Thread(target=forever, daemon=True).start()\n"
                "time.sleep(0.05)\n"
                "print('done')")
        self.assert_ends(code, times=8)

    def test_sources_may_use_pinflow_while_python_ends(self):
        code = ("import sys, time, numpy as np, pinflow\n"
                "pinflow.save(sys.argv[1], np.zeros((20000, 7), 'i4'))\n"
                "rows = pinflow.open(sys.argv[1])\n"
                "class Source:\n"
                "    dtype, shape = 'int32', (20000, 7)\n"
                "    def read_rows(self, ids, out):\n"
                "        time.sleep(0.005)\n"
                "        np.frombuffer(out, 'i4').reshape(-1, 7)[:] = rows.rows(np.asarray(ids))\n"
                "loader = pinflow.Loader(Source(), batch=64, device='host')\n"
                "for (x,) in loader: break\n"
                "print('done')")
        done = run_python(code, self.path("pa.npy"))
        self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)

    def test_a_loader_may_end_on_its_own_thread(self):
        code = ("import gc, threading, numpy as np, pinflow, weakref\n"
                "trained, collected = threading.Event(), threading.Event()\n"
                "class Source:\n"
                "    dtype, shape = 'int32', (20000, 7)\n"
                "    reads = 0\n"
                "    def read_rows(self, ids, out):\n"
                "        self.reads += 1\n"
                "        if self.reads == 3:\n"
                "            trained.wait(60)\n"
                "            gc.collect()\n"
                "            if dead() is None: collected.set()\n"
                "        np.frombuffer(out, 'i4')[:] = 0\n"
                "class Trainer:\n"
                "    def __init__(self):\n"
                "        self.loader = pinflow.Loader(Source(), batch=64, threads=1, device='host')\n"
                "        self.hook = lambda: self\n"
                "def train():\n"
                "    global dead\n"
                "    gc.disable()\n"
                "    trainer = Trainer()\n"
                "    dead = weakref.ref(trainer)\n"
                "    for (x,) in trainer.loader: break\n"
                "train()\n"
                "trained.set()\n"
                "print('done' if collected.wait(60) else 'kept')")
        self.assert_ends(code, times=2)

    def test_a_forked_child_may_close_a_loader_but_not_use_it(self):
        loader = pinflow.Loader(numbered(), device="host", batch=10)
        for _ in loader:
            break
        child = os.fork()
        if child == 0:
            try:
                with loader:
                    next(iter(loader))
            except pinflow.DeviceError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        loader.close()

    def test_a_forked_child_gets_a_sentence(self):
        loader = pinflow.Loader(numbered(), device="host")
        child = os.fork()
        if child == 0:
            try:
                next(iter(loader))
            except pinflow.DeviceError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(sum(len(rows) for (rows,) in loader), ROWS)


class WindowTest(Folder):
    def check(self, source, expected, **options):
        """Checks that a shuffled epoch delivers every row of `expected`."""
        loader = pinflow.Loader(source, batch=100, epochs=1, device="cpu", **options)
        seen = set()
        for (rows,) in loader:
            np.testing.assert_array_equal(rows.numpy(), expected[np.asarray(rows.numpy()[:, 0], dtype=np.int64)
                                                                 // self.step])
            seen.update((rows.numpy()[:, 0] // self.step).tolist())
        self.assertEqual(len(seen), len(expected))
        return loader

    step = 48

    def test_sequences_of_tokens_are_loaded_from_the_file(self):
        tokens = np.arange(50_001, dtype=np.uint32)
        opened = pinflow.open(self.saved("tokens.npy", tokens))
        windows = opened.sliding_windows(65, self.step)
        expected = np.lib.stride_tricks.sliding_window_view(tokens, 65)[::self.step]
        self.assertEqual(windows.shape, expected.shape)
        self.assertTrue(windows.mapped)
        self.assertIn("one every 48", windows.reason)
        np.testing.assert_array_equal(windows, expected)
        self.assertTrue(np.shares_memory(np.asarray(windows), np.asarray(opened)))
        np.testing.assert_array_equal(windows[5], expected[5])
        np.testing.assert_array_equal(windows.rows([7, 0, 7]), expected[[7, 0, 7]])
        self.check(windows, expected)
        self.check(pickle.loads(pickle.dumps(windows)), expected)
        both = pinflow.concatenate([windows, expected[:10]])
        np.testing.assert_array_equal(np.asarray(both)[-10:], expected[:10])

    def test_windows_of_arrays_that_are_not_mapped_are_loaded_from_memory(self):
        tokens = np.arange(20_000, dtype=np.int64)
        np.savez_compressed(self.path("tokens.npz"), tokens=tokens)
        expected = np.lib.stride_tricks.sliding_window_view(tokens, 100)[::self.step]
        self.check(pinflow.open(self.path("tokens.npz")).sliding_windows(100, self.step), expected)
        big = pinflow.open(self.saved("big.npy", tokens.astype(">i8")))
        self.check(big.sliding_windows(100, self.step), expected)

    def test_windows_of_several_files_are_those_of_each(self):
        for number in range(3):
            self.saved(f"part-{number}.npy", np.arange(100) + 1000 * number)
        for array in (pinflow.open(self.path("part-*.npy")), pinflow.concatenate([np.arange(9)])):
            with self.assertRaisesRegex(pinflow.Unsupported, "concatenate"):
                array.sliding_windows(5)
        parts = [pinflow.open(self.path(f"part-{number}.npy")).sliding_windows(5, 2) for number in range(3)]
        windows = pinflow.concatenate(parts)
        np.testing.assert_array_equal(windows, np.concatenate([np.asarray(part) for part in parts]))
        self.assertEqual(len(pinflow.Loader(windows, batch=1, device="cpu")), sum(map(len, parts)))

    def test_rows_that_take_more_bytes_than_there_are_are_refused(self):
        class Endless:
            dtype, shape = "f8", (1 << 61, 4)

            def read_rows(self, ids, out):
                pass

        with self.assertRaisesRegex(pinflow.SystemFailure, "into memory"):
            np.asarray(pinflow.concatenate([Endless()]))

    def test_copies_that_memory_cannot_hold_are_refused_before_they_are_made(self):
        windows = np.lib.stride_tricks.sliding_window_view(np.zeros(1 << 26, np.uint8), 1 << 20)
        columns = np.broadcast_to(np.zeros((1 << 26, 1), np.uint8), (1 << 26, 1 << 20)).T
        for name, copy in (("the table's array", lambda: pinflow.RowTable(windows, device="cpu")),
                           ("an array", lambda: pinflow.save(self.path("columns.npy"), columns)),
                           ("the tensor 'w'", lambda: pinflow.save_file({"w": windows}, self.path("w.safetensors")))):
            with self.subTest(name), self.assertRaisesRegex(pinflow.SystemFailure, f"cannot copy {name} of shape .* more than "
                                                            "the .* that may be taken") as raised:
                copy()
            self.assertEqual(raised.exception.errno, errno.ENOMEM)
        self.assertEqual([name for name in os.listdir(self._folder.name) if "columns" in name or name == "w.safetensors"], [])

    def test_windows_and_views_are_saved_as_they_look(self):
        tokens = np.arange(1000, dtype=np.int16)
        table = np.arange(600, dtype=">f8").reshape(20, 30)
        for view in (np.lib.stride_tricks.sliding_window_view(tokens, 10)[::4], tokens[::3], table[:, 3:9], table[::2, :1],
                     table[::-1],
                     table[5:5, :3], table.T, pinflow.open(self.saved("t.npy", tokens)).sliding_windows(7)):
            pinflow.save(self.path("view.npy"), view)
            np.testing.assert_array_equal(np.load(self.path("view.npy")), np.asarray(view))

    def test_a_table_of_a_read_only_view_is_a_copy_of_any_size(self):
        table = np.arange(2000).reshape(100, 20)[:, :8]
        table.setflags(write=False)
        for least in (0, 1 << 40):
            with mock.patch.object(_sources, "_MIN_STRIDED_BYTES", least):
                rows = pinflow.RowTable(table, device="cpu").gather([3, 99])
            np.testing.assert_array_equal(rows, table[[3, 99]])
        table = np.zeros((10, 20))[:, :8]
        with self.assertRaisesRegex(pinflow.InvalidArgument, "strides \\(160, 8\\)"):
            pinflow.RowTable(table, device="cpu")

    def test_windows_of_rows_have_their_axes(self):
        frames = np.arange(30 * 2 * 3).reshape(30, 2, 3)
        windows = pinflow.open(self.saved("frames.npy", frames)).sliding_windows(4)
        self.assertEqual(windows.shape, (27, 4, 2, 3))
        np.testing.assert_array_equal(windows[26], frames[26:])

    def test_a_length_and_a_step_are_whole_numbers_above_0(self):
        array = pinflow.open(self.saved())
        for wrong in ((0, 1), (1, 0), (-1, 1), (2.0, 1), (True, 1), (None, 1), (1, "1"), (1 << 63, 1)):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "whole number above 0"):
                array.sliding_windows(*wrong)
        with self.assertRaisesRegex(pinflow.InvalidArgument, "axes"):
            pinflow.open(self.saved("scalar.npy", np.float32(1))).sliding_windows(1)
        self.assertEqual(array.sliding_windows(ROWS + 1).shape, (0, ROWS + 1, WIDTH))

    def test_a_large_numpy_view_whose_rows_are_contiguous_is_not_copied(self):
        # 2000 windows of 2^16 numbers: 500 MiB if they were copied
        code = ("import numpy, pinflow, resource\n"
                "tokens = numpy.arange((1 << 16) + 2000 * 48, dtype=numpy.int32)\n"
                "windows = numpy.lib.stride_tricks.sliding_window_view(tokens, 1 << 16)[::48]\n"
                "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
                "loader = pinflow.Loader(windows, batch=10, epochs=1, device='cpu', memory=16 << 20)\n"
                "for number, (rows,) in enumerate(loader):\n"
                "    first = int(rows.numpy()[0, 0]) // 48\n"
                "    assert (rows.numpy()[0] == windows[first]).all()\n"
                "    if number == 20: break\n"
                "loader.close()\n"
                "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n")
        done = run_python(code)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(int(done.stdout), 200 << 10)  # KiB

    def test_large_numpy_views_with_any_strides_are_loaded_as_they_look(self):
        table = np.arange(3000 * 8, dtype=np.float32).reshape(-1, 8)
        of_tokens = np.lib.stride_tricks.sliding_window_view(np.arange(500), 20)
        views = {"columns": table[:, :6], "one column": table[:, 3], "every second": table[::2],
                 "a part": table[1::3, 2:], "windows": of_tokens, "some windows": of_tokens[5::7], "one": table[:1, :3],
                 "big-endian": table.astype(">f4")[::3], "reversed": table[::-1], "inner steps": table[:, ::2],
                 "transposed": table.T, "repeated": np.broadcast_to(table[0], (50, 8)), "empty": table[:0, :2]}
        for name, view in views.items():
            for least in (0, 1 << 40):  # taken in place if possible, or copied
                with self.subTest(name), mock.patch.object(_sources, "_MIN_STRIDED_BYTES", least):
                    loader = pinflow.Loader(view, batch=100, epochs=1, order="sequential", device="cpu", memory=64 << 20)
                    rows = [rows.numpy().copy() for (rows,) in loader]
                    np.testing.assert_array_equal(np.concatenate(rows) if rows else view[:0], view)


class TableTest(Folder):
    def test_rows_by_index_and_back(self):
        weights = np.random.default_rng(1).random((ROWS, 8), dtype=np.float32)
        before = weights.copy()
        table = pinflow.RowTable(weights, device="host")
        self.assertEqual(len(table), ROWS)
        ids = np.array([5, 999, 5, 0])
        np.testing.assert_array_equal(table.gather(ids), before[ids])
        out = np.empty((4, 8), np.float32)
        self.assertIs(table.gather(ids.tolist(), out), out)
        np.testing.assert_array_equal(out, before[ids])
        table.scatter([1, 2], np.ones((2, 8), np.float32))
        np.testing.assert_array_equal(weights[1:3], 1)
        table.scatter([3, 3], np.ones((2, 8), np.float32), duplicates="sum")
        np.testing.assert_array_equal(weights[3], 2)
        np.testing.assert_array_equal(weights[4:], before[4:])
        with self.assertRaises(ValueError):
            table.scatter([3, 3], np.ones((2, 8), np.float32), duplicates="error")
        self.assertTrue(table.reason(4))

    def test_wrong_calls_are_refused(self):
        table = pinflow.RowTable(numbered(), device="host")
        for ids in ([ROWS], [-1], [[1]], [0.5], [True, False], 3):
            with self.assertRaises(ValueError):
                table.gather(ids)
        with self.assertRaises(ValueError):
            table.gather([1], np.empty((1, WIDTH), np.int32))
        with self.assertRaises(ValueError):
            table.gather([1], np.empty((2, WIDTH), np.int64))
        with self.assertRaises(ValueError):
            pinflow.RowTable([[1.0], [2.0]], device="host")  # a list has no memory to work in
        np.testing.assert_array_equal(table.gather(np.array([7], np.int32)), numbered()[7:8])
        table.scatter([7], [[3] * WIDTH])
        read_only = pinflow.RowTable(self.saved(), device="host")
        np.testing.assert_array_equal(read_only.gather([7]), numbered()[7:8])
        with self.assertRaises(pinflow.Unsupported):
            read_only.scatter([1], numbered()[:1])


class PackageTest(Folder):
    def test_import_is_quick_and_takes_nothing_along(self):
        done = run_python("import sys, time; start = time.perf_counter(); import pinflow\n"
                          "print(time.perf_counter() - start, [m for m in ('numpy', 'torch') if m in sys.modules])")
        seconds, _, modules = done.stdout.strip().partition(" ")
        self.assertEqual(modules, "[]", done.stderr)
        self.assertLess(float(seconds), 1)  # much longer than it takes: samples/bench/python_cost.py measures it

    def test_every_public_name_has_a_docstring(self):
        for name in pinflow.__all__:
            value = getattr(pinflow, name)
            self.assertTrue(value.__doc__, name)
            if inspect.isclass(value) and not issubclass(value, Exception):
                for member, held in inspect.getmembers(value):
                    if not member.startswith("_") and not isinstance(held, property):
                        self.assertTrue(held.__doc__, f"{name}.{member}")

    def test_the_tool_is_there(self):
        done = subprocess.run([sys.executable, "-m", "pinflow", "--version"], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual(done.stdout, f"pinflow {pinflow.__version__}\n")
        np.savez_compressed(self.path("a.npz"), a=numbered())
        pinflow.convert(self.path("a.npz"), self.path("a.npy"))
        np.testing.assert_array_equal(np.load(self.path("a.npy")), numbered())
        before = os.getcwd()
        try:
            os.chdir(self.path(""))
            pinflow.convert("a.npz", "-dashed.npy", "--dtype", "int32")  # a name that looks like an option
            self.assertEqual(np.load("-dashed.npy").dtype, np.int32)
        finally:
            os.chdir(before)
        with self.assertRaises(pinflow.NotFound) as raised:
            pinflow.convert(self.path("none.npz"), self.path("b.npy"))
        self.assertIn("none.npz", str(raised.exception))
        with self.assertRaises(pinflow.Error) as raised:
            pinflow.convert(self.path("a.npz"), self.path("no_folder/b.npy"))
        self.assertIn("no_folder", str(raised.exception))

    @unittest.skipUnless(shutil.which("readelf"), "needs readelf")
    def test_its_library_can_be_loaded_after_others(self):
        dynamic = subprocess.run(["readelf", "-d", pinflow._native.__file__], capture_output=True, text=True, check=True)
        self.assertIn("NEEDED", dynamic.stdout)
        self.assertNotIn("STATIC_TLS", dynamic.stdout)  # libraries loaded later find little static TLS space

    def test_devices(self):
        self.assertEqual(pinflow.devices()[0]["name"], "host")
        self.assertIsInstance(pinflow.no_cuda_reason(), str)


if __name__ == "__main__":
    unittest.main()
