"""Wrong and unusual arguments of the loader and its sources. Needs numpy: python -m unittest test_arguments"""

import copy
import importlib.util
import multiprocessing
import os
import pickle
import threading
import unittest
import warnings

import numpy as np

import pinflow
from test_pinflow import ROWS, Folder, numbered, run_python

try:
    import torch
except ImportError:
    torch = None


class Rows:
    """Each row has its number three times."""
    dtype = "float32"
    shape = (ROWS, 3)

    def __init__(self, before=lambda ids: None):
        self.before = before

    def read_rows(self, ids, out):
        self.before(np.asarray(ids))
        np.frombuffer(out, np.float32).reshape(len(ids), 3)[:] = np.asarray(ids)[:, None]


def first_row_of(array):
    return int(np.asarray(array)[0, 0])


class SourceTest(Folder):
    def assert_refused(self, sentence, make):
        with self.assertRaises(pinflow.InvalidArgument) as caught:
            make()
        self.assertIn(sentence, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_things_that_are_no_source_are_named(self):
        for thing, name in ((5, "int"), (float("nan"), "float"), (True, "bool"), (object(), "object")):
            self.assert_refused(f"RowSource (help(pinflow.RowSource)), not {name}", lambda: pinflow.Loader(thing))
        self.assert_refused("an array of Python objects", lambda: pinflow.Loader(np.array([1, "x"], object)))
        self.assert_refused("given as a list, not as str", lambda: pinflow.concatenate("x.npy"))
        self.assert_refused("given as a list, not as int", lambda: pinflow.stack(5))
        self.assert_refused("given as a list, not as ndarray", lambda: pinflow.concatenate(np.array(3)))

    def test_a_dataset_is_no_source_and_is_not_saved(self):
        class Dataset:
            read = 0

            def __len__(self):
                return 3

            def __getitem__(self, index):
                Dataset.read += 1
                return np.zeros(2)

        for call in (pinflow.Loader, lambda each: pinflow.concatenate([each]), lambda each: pinflow.save("x.npy", each)):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "Dataset"):
                call(Dataset())
        self.assertEqual(Dataset.read, 0)

    def test_a_copy_that_does_not_fit_into_memory_is_an_error_of_the_system(self):
        with self.assertRaisesRegex(pinflow.SystemFailure, "cannot copy .* not contiguous: .* RowSource"):
            pinflow.Loader(np.broadcast_to(np.zeros(2), (1 << 46, 2)), device="cpu")

    def test_rows_of_no_bytes_are_not_read_only(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for (rows,) in pinflow.Loader(np.zeros((5, 0)), device="cpu"):
                self.assertFalse(rows.__array_interface__["data"][1])

    def test_what_a_source_of_rows_says_of_itself_is_checked(self):
        def source(**members):
            made = Rows()
            for name, value in members.items():
                setattr(made, name, value)
            return lambda: pinflow.Loader(made, device="host")

        for shape in ((1 << 64, 3), (1000.0, 3), (-1, 3), (True, 3)):
            self.assert_refused("whole numbers from 0 to 2**63 - 1", source(shape=shape))
        self.assert_refused("or a name such as 'bfloat16', not 'foo'", source(dtype="foo"))
        self.assert_refused("is a method, not 5", source(read_rows=5))

    def test_a_path_may_be_bytes(self):
        path = os.fsencode(self.saved())
        self.assertEqual(sum(len(rows) for (rows,) in pinflow.Loader(path, device="host")), ROWS)
        self.assertEqual(pinflow.concatenate([path, path]).shape[0], 2 * ROWS)

    def test_arrays_without_axes_are_stacked(self):
        paths = [self.saved(f"{i}.npy", np.int64(i)) for i in range(3)]
        np.testing.assert_array_equal(np.asarray(pinflow.stack(paths)), [0, 1, 2])
        np.testing.assert_array_equal(np.asarray(pinflow.stack([np.float32(1), np.float32(2)])), [1, 2])
        self.assertEqual(np.asarray(pinflow.stack([numbered(2), numbered(2)])).shape, (2, 2, 16))
        self.assertRaises(pinflow.Unsupported, pinflow.concatenate, paths)

    def test_padding_between_fields_is_no_field(self):
        padded = np.dtype([("f1", "u1"), ("b", "<f8"), ("c", "u1", (3,))], align=True)
        rows = np.zeros(10, padded)
        rows["f1"], rows["b"] = np.arange(10), -np.arange(10)
        array = pinflow.open(self.saved(array=rows))
        self.assertEqual(array.dtype, padded)
        np.testing.assert_array_equal(np.asarray(array)["b"], rows["b"])
        for (loaded,) in pinflow.Loader(array, order="sequential", batch=10, device="host"):
            self.assertEqual(loaded.dtype, padded)
            for given in (loaded.numpy(), np.asarray(loaded)):
                self.assertEqual(given.dtype, padded)
                np.testing.assert_array_equal(given["f1"], rows["f1"])
                np.testing.assert_array_equal(given["b"], rows["b"])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs PyTorch")
    def test_tensors_of_pytorch_are_sources(self):
        import torch

        values = torch.arange(20.0).reshape(10, 2)
        for tensor in (values, values.to(torch.bfloat16), torch.nn.Parameter(values.clone()), values.t().contiguous().t()):
            loader = pinflow.Loader(tensor, order="sequential", batch=10, device="host")
            self.assertTrue(all(torch.equal(rows.torch(), tensor.detach()) for (rows,) in loader))
        self.assert_refused("dense tensor on the CPU", lambda: pinflow.Loader(values.to_sparse(), device="host"))
        halves = torch.empty(3, dtype=torch.complex32)
        self.assert_refused("pinflow has no such type", lambda: pinflow.Loader(halves, device="host"))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs PyTorch")
    def test_pytorch_is_warned_of_memory_that_must_not_be_written(self):
        import torch  # noqa: F401 (its import may warn)

        path = self.saved()
        for route, count in (("direct", 1), ("read", 0)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                (rows,) = next(iter(pinflow.Loader(path, order="sequential", route=route, device="host")))
                rows.torch()
            self.assertEqual(len([each for each in caught if "must not be written to" in str(each.message)]), count)


class TableTest(Folder):
    def test_rows_of_another_byte_order_are_refused(self):
        rows = np.arange(12.0).reshape(4, 3)
        table = pinflow.RowTable(rows, device="host")
        for call in (lambda: table.gather([1, 2], out=np.zeros((2, 3), ">f8")),
                     lambda: table.scatter([1, 2], np.ones((2, 3), ">f8"))):
            with self.assertRaisesRegex(pinflow.Unsupported, "ndarray of >f8 cannot be exchanged"):
                call()
        np.testing.assert_array_equal(rows, np.arange(12.0).reshape(4, 3))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs PyTorch")
    def test_tensors_of_pytorch_are_tables(self):
        import torch

        for dtype in (torch.float32, torch.bfloat16):
            values = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3).to(dtype))
            table = pinflow.RowTable(values, device="host")
            expected = values.detach()[[3, 0]].clone()
            self.assertTrue(torch.equal(torch.as_tensor(table.gather([3, 0])), expected))
            table.scatter([1], torch.full((1, 3), 9.0, dtype=dtype))
            table.scatter([2], [[7, 7, 8]])
            self.assertEqual(values[1:3].tolist(), [[9, 9, 9], [7, 7, 8]])
        complex_values = torch.ones(2, 3, dtype=torch.complex64)
        for tensor, reason in ((complex_values.t(), "contiguous"), (complex_values.conj(), "resolve_conj")):
            with self.assertRaisesRegex(pinflow.InvalidArgument, reason):
                pinflow.RowTable(tensor, device="host")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs PyTorch")
    def test_pytorch_refuses_gradients_of_what_a_table_has_changed(self):
        import torch

        weights, out = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
        table = pinflow.RowTable(weights, device="cpu")
        losses = [(each * each).sum() for each in (weights, out)]
        table.scatter([0], torch.zeros(1, 4))
        table.gather([0, 1, 2, 3], out=out)
        for each in losses:
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                each.backward()

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs PyTorch")
    def test_tensors_of_pytorch_are_saved(self):
        import torch

        path = self.path("tensor.npy")
        values = torch.arange(6.0).reshape(2, 3)
        for tensor in (torch.nn.Parameter(values), values.t(), torch.complex(values, values).conj()):
            pinflow.save(path, tensor)
            np.testing.assert_array_equal(np.load(path), tensor.detach().resolve_conj().numpy())
        pinflow.save(path, values.bfloat16())
        self.assertEqual(np.load(path).view(np.uint16).tolist(), values.bfloat16().view(torch.uint16).tolist())

    def test_texts_that_cannot_be_encoded_are_refused(self):
        array = self.saved()
        for call in (lambda: pinflow.open("\ud800.npy"), lambda: pinflow.open(array, "\ud800"), lambda: pinflow.list("\ud800"),
                     lambda: pinflow.open(array, b"a"), lambda: pinflow.load_file("\ud800"), lambda: pinflow.save("\ud800.npy", 1),
                     lambda: pinflow.convert(array, "\ud800.npz")):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "cannot be encoded|valid Unicode"):
                call()

    def test_a_device_has_the_same_names_everywhere(self):
        made = [lambda device: pinflow.Loader(numbered(), device=device),
                lambda device: pinflow.RowTable(numbered(), device=device)]
        for make in made:
            for device in ("cpu", "host"):
                self.assertEqual(make(device).device, "host")
            for device in ("gpu", "cuda:x", "cuda:-1", None, True, ["cpu"]):
                with self.assertRaisesRegex(pinflow.InvalidArgument, "a device is 'auto', 'host' or 'cpu', 'cuda', 'cuda:N'"):
                    make(device)
        with self.assertRaisesRegex(pinflow.InvalidArgument, "a device is 'host' or 'cpu'"):
            pinflow.load_file(self.saved(), device="auto")
        with self.assertRaisesRegex(pinflow.InvalidArgument, "not -1$"):
            pinflow.load_file(self.saved(), device=-1)


class CallbackTest(unittest.TestCase):
    def test_stop_iteration_does_not_end_an_epoch(self):
        def stop(ids):
            if 700 in ids:
                next(iter(()))

        class Order:
            name, position_count = "stops/1", ROWS

            def rows_at(self, epoch, first, out):
                raise StopIteration

        for loader in (pinflow.Loader(Rows(stop), batch=10, order="sequential", device="host"),
                       pinflow.Loader(Rows(), order=Order(), device="host")):
            with self.assertRaisesRegex(RuntimeError, "raised StopIteration") as caught:
                for _ in loader:
                    pass
            self.assertIsInstance(caught.exception.__cause__, StopIteration)

    def test_a_source_cannot_use_the_loader_that_calls_it(self):
        for use, sentence in ((lambda loader: loader.state_dict(), "cannot read rows of the same source"),
                              (lambda loader: next(loader._loader.next()), "cannot take batches of the loader that calls it")):
            for join in (lambda source: source, lambda source: pinflow.concatenate([source])):
                made = threading.Event()
                loaders = []

                def call(ids):
                    made.wait()
                    use(loaders[0])

                loaders.append(pinflow.Loader(join(Rows(call)), device="host"))
                made.set()
                with self.assertRaisesRegex(pinflow.InvalidArgument, sentence):
                    next(iter(loaders[0]))
                loaders[0].close()

    def test_a_source_may_use_another_loader(self):
        inner = pinflow.Loader(Rows(), order="sequential", batch=10, device="host")
        source = Rows(lambda ids: next(iter(inner)))
        self.assertEqual(sum(len(rows) for (rows,) in pinflow.Loader(source, batch=100, device="host")), ROWS)


class LoaderTest(Folder):
    def test_a_loader_and_a_batch_cannot_be_copied(self):
        loader = pinflow.Loader(self.saved(), device="host")
        with self.assertRaisesRegex(TypeError, "make another one"):
            copy.copy(loader)
        with self.assertRaisesRegex(TypeError, "clone its tensors"):
            copy.copy(next(loader.batches()))

    def test_row_numbers_are_signed_and_belong_to_the_caller(self):
        batch = next(pinflow.Loader(self.saved(), device="host").batches())
        self.assertEqual(batch.row_ids.dtype, np.int64)
        self.assertTrue(batch.row_ids.flags.writeable)
        np.testing.assert_array_equal(batch[0].numpy()[:, 0], batch.row_ids)

    def test_an_order_may_have_more_positions_than_2_to_the_32nd(self):
        class Endless:
            name, position_count = "endless/1", 10**10

            def rows_at(self, epoch, first, out):
                np.asarray(out)[:] = 3

        loader = pinflow.Loader(self.saved(), order=Endless(), batch=10, device="host")
        self.assertEqual(first_row_of(next(iter(loader))[0]), 3)

    def test_an_order_that_does_not_write_its_row_numbers_is_refused(self):
        class Order:
            name, position_count = "mine/1", ROWS

            def __init__(self, written, returned):
                self._written, self._returned = written, returned

            def rows_at(self, epoch, first, out):
                for i in range(min(len(out), self._written)):
                    out[i] = first + i
                return np.arange(first, first + len(out)) if self._returned else None

        for order, sentence in ((Order(ROWS, True), "mine/1.*rows_at returned a value; it must write"),
                                (Order(3, False), "18446744073709551615")):
            with self.assertRaisesRegex(pinflow.InvalidArgument, sentence):
                for _ in pinflow.Loader(self.saved(), order=order, batch=10, device="host"):
                    pass

    def test_a_weighted_order_draws_rows_in_proportion(self):
        path = self.saved()
        weights = np.zeros(ROWS)
        weights[[3, 5]] = 1, 3
        for given in (weights, weights.tolist(), (weights * 7).astype(np.int32)):
            loader = pinflow.Loader(path, order="weighted", weights=given, draws=4000, batch=100, seed=2, device="host")
            epochs = [np.concatenate([batch.row_ids for batch in loader.batches()]) for _ in range(2)]
            for drawn in epochs:
                self.assertEqual(len(drawn), 4000)
                self.assertEqual(set(drawn.tolist()), {3, 5})
                self.assertAlmostEqual(float((drawn == 5).mean()), 0.75, delta=0.05)
            self.assertFalse(np.array_equal(*epochs))
        loader = pinflow.Loader(path, order="weighted", weights=weights, batch=100, device="host")
        first = next(loader.batches())
        self.assertEqual(len(loader), -(-ROWS // 100))
        resumed = pinflow.Loader(path, order="weighted", weights=weights, batch=100, device="host")
        resumed.load_state_dict(first.state_dict())
        rest = [batch.row_ids for batch in resumed.batches()]
        whole = [batch.row_ids for batch in
                 pinflow.Loader(path, order="weighted", weights=weights, batch=100, device="host").batches()]
        np.testing.assert_array_equal(np.concatenate(rest), np.concatenate(whole[1:]))
        for wrong, text in (({"order": "weighted"}, "belong together"), ({"weights": weights}, "belong together"),
                            ({"draws": 5}, "needs order='weighted'"),
                            ({"order": "weighted", "weights": weights[:-1]}, str(ROWS)),
                            ({"order": "weighted", "weights": -weights}, "negative"),
                            ({"order": "weighted", "weights": weights.reshape(1, -1)}, "one axis"),
                            ({"order": "weighted", "weights": np.zeros(ROWS)}, "above 0"),
                            ({"order": "weighted", "weights": weights, "draws": -1}, "draws must be")):
            with self.assertRaisesRegex(pinflow.InvalidArgument, text):
                pinflow.Loader(path, device="host", **wrong)

    def test_rows_and_row_numbers_of_other_kinds_are_refused(self):
        numbers = np.zeros(3, np.int32)
        table = pinflow.RowTable(numbers, device="host")
        for rows in (None, [None], "7", [1.9], [1 + 2j]):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "cannot become rows"):
                table.scatter([0], rows)
        table.scatter([0, 1], [True, 5])
        self.assertEqual(numbers.tolist(), [1, 5, 0])
        small = np.zeros((2, 2), np.uint8)
        pinflow.RowTable(small, device="host").scatter([1], [[7, 255]])
        self.assertEqual(small.tolist(), [[0, 0], [7, 255]])
        with self.assertRaisesRegex(pinflow.InvalidArgument, "mask"):
            table.gather(np.ma.array([1, 2], mask=[0, 1]))

    def test_things_that_are_no_order_are_named(self):
        path = self.saved()
        for order in (None, 5, {1, 2}, object()):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "an order is 'sequential', 'shuffled'"):
                pinflow.Loader(path, order=order, device="host")
        with self.assertRaisesRegex(pinflow.InvalidArgument, "batch must be a whole number"):
            pinflow.Loader(path, batch=np.array([4]), device="host")

    def test_a_seed_has_64_bits(self):
        path, max_seed = self.saved(), (1 << 64) - 1
        loader = pinflow.Loader(path, seed=max_seed, device="host")
        expected = [batch.row_ids.tolist() for batch in loader.batches()]
        other = pinflow.Loader(path, seed=np.uint64(max_seed), device="host")
        other.load_state_dict(pinflow.Loader(path, seed=max_seed, device="host").state_dict())
        self.assertEqual([batch.row_ids.tolist() for batch in other.batches()], expected)
        self.assertRaises(pinflow.InvalidArgument, pinflow.Loader, path, seed=1 << 64)

    def test_a_loop_of_two_threads_at_a_time_is_refused(self):
        may_read = threading.Event()
        loader = pinflow.Loader(Rows(lambda ids: may_read.wait()), device="host")
        loop = iter(loader)
        rows = []
        first = threading.Thread(target=lambda: rows.append(len(next(loop)[0])))
        first.start()
        while loader._thread_in_next != first.ident:
            pass
        with self.assertRaisesRegex(pinflow.Error, "another thread waits"):
            next(loop)
        may_read.set()
        first.join()
        self.assertEqual(rows, [64])
        self.assertEqual(sum(len(rest) for (rest,) in loop), ROWS - 64)

    def test_closing_a_loader_that_is_waited_for_is_no_end_of_an_epoch(self):
        may_read = threading.Event()
        loader = pinflow.Loader(Rows(lambda ids: may_read.wait()), device="host")
        waiting = threading.get_ident()

        def close():
            while loader._thread_in_next != waiting:
                pass
            loader.close()  # waits for the thread that reads

        def read():
            while not loader._closed:
                pass
            may_read.set()

        others = [threading.Thread(target=each) for each in (close, read)]
        for each in others:
            each.start()
        with self.assertRaisesRegex(pinflow.Error, "was closed while it waited"):
            next(iter(loader))
        for each in others:
            each.join()

    def test_an_array_is_opened_again_in_a_spawned_process(self):
        folder = os.getcwd()
        self.addCleanup(os.chdir, folder)
        self.saved("b.npy", numbered() + 5)
        self.saved("a.npy")
        os.chdir(self._folder.name)
        os.mkdir("r[1]")
        os.chdir("r[1]")
        os.symlink(os.path.join(self._folder.name, "r[1]"), "self")
        arrays = [pinflow.open("../b.npy"), pinflow.open("../[ab].npy"), pinflow.open("self/../b.npy"),
                  pinflow.stack(["../b.npy", numbered()])]
        os.chdir(folder)
        for array in arrays:
            np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(array))), np.asarray(array))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            self.assertEqual(pool.map(first_row_of, arrays[:2]), [5, 0])

    def check_ends_quietly(self, code):
        for _ in range(5):
            done = run_python(code)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_thread_in_a_loop_when_python_ends_prints_nothing(self):
        code = ("import sys, threading, numpy, pinflow\n"
                "def loop():\n"
                "    while True:\n"
                "        for _ in pinflow.Loader(numpy.arange(1000), batch=10, device='host'):\n"
                "            begun.set()\n"
                "begun = threading.Event()\n"
                "for _ in range(3): threading.Thread(target=loop, daemon=True).start()\n"
                "begun.wait()\n")
        self.check_ends_quietly(code)


    def test_tables_of_rows_that_are_no_numbers_are_refused(self):
        for name, rows in (("dates", np.arange(3).astype("M8[s]")), ("text", np.array(["ab", "c"]))):
            for given in (self.saved(f"{name}.npy", rows), rows):
                with self.assertRaisesRegex(pinflow.InvalidArgument, "cannot be exchanged"):
                    pinflow.RowTable(given, device="host")
        table = pinflow.RowTable(np.zeros((3, 2), "u1"), device="host")
        with self.assertRaises(pinflow.InvalidArgument):
            table.scatter([0], [[1, 300]])

    @unittest.skipUnless(torch, "PyTorch is not installed")
    def test_tensors_that_require_gradients_are_rows_and_weights(self):
        table = pinflow.RowTable(np.zeros((3, 2), "f4"), device="host")
        table.scatter([1], torch.ones(1, 2, requires_grad=True))
        out = torch.nn.Parameter(torch.zeros(1, 2))
        table.gather([1], out)
        self.assertEqual(out.tolist(), [[1, 1]])
        for kind in (torch.float32, torch.bfloat16):
            weights = torch.tensor([0, 1, 0], dtype=kind, requires_grad=True)
            loader = pinflow.Loader(np.arange(3), order="weighted", weights=weights, device="host")
            self.assertEqual({int(each) for (x,) in loader for each in x.numpy()}, {1})

    def test_a_thread_in_a_load_or_save_when_python_ends_prints_nothing(self):
        path = self.saved("a.npy")
        code = ("import sys, threading, numpy, pinflow\n"
                f"path = {path!r}\n"
                "def load():\n"
                "    while True:\n"
                "        pinflow.load_file(path, framework='np', progress=lambda *_: begun.set())\n"
                "def save(number):\n"
                "    while True:\n"
                "        pinflow.save_file({'a': numpy.arange(1000)}, f'{path}.{number}')\n"
                "begun = threading.Event()\n"
                "for _ in range(3): threading.Thread(target=load, daemon=True).start()\n"
                "for i in range(2): threading.Thread(target=save, args=(i,), daemon=True).start()\n"
                "begun.wait()\n")
        self.check_ends_quietly(code)


if __name__ == "__main__":
    unittest.main()
