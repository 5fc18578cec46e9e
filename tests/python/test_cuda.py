"""The Python package on a GPU, with PyTorch, and with CuPy and JAX if they are installed. Without a GPU or PyTorch every
test is skipped. Run with the package on sys.path: python -m unittest test_cuda

PINFLOW_STARTS is the number of times that a loader is started and stopped while memory is watched (200).
"""

import gc
import os
import queue
import tempfile
import threading
import unittest
from collections import deque

import numpy as np

import pinflow
from test_pinflow import numbered, run_python

try:
    import torch
except ImportError:
    torch = None
try:
    import cupy
except ImportError:
    cupy = None
try:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
except ImportError:
    jax = None

ROWS, WIDTH, BATCH = 4000, 64, 20
has_gpu = torch is not None and torch.cuda.is_available() and not pinflow.no_cuda_reason()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@unittest.skipUnless(has_gpu, "needs a GPU and PyTorch")
class CudaTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "rows.npy")
        np.save(self.path, numbered(ROWS, WIDTH))

    def assert_rows(self, tensor, ids):
        expected = np.repeat(ids.astype(np.int64)[:, None], WIDTH, axis=1)
        np.testing.assert_array_equal(tensor.cpu().numpy(), expected)


class TensorTest(CudaTest):
    def test_sliding_windows_are_taken_in_place(self):
        tokens = np.arange(9_000_000, dtype=np.int32)
        with tempfile.TemporaryDirectory() as folder:
            np.save(os.path.join(folder, "tokens.npy"), tokens)
            of_file = pinflow.open(os.path.join(folder, "tokens.npy")).sliding_windows(1025, 64)
            of_memory = np.lib.stride_tricks.sliding_window_view(tokens, 1025)[::64]
            for windows in (of_file, of_memory):
                for order in ("sequential", "shuffled"):
                    loader = pinflow.Loader(windows, batch=512, epochs=2, order=order)
                    count = 0
                    for (rows,) in loader:
                        rows = rows.torch()
                        ramp = torch.arange(1025, dtype=torch.int32, device=rows.device)
                        self.assertTrue(torch.equal(rows, rows[:, :1] + ramp))
                        self.assertTrue(bool((rows[:, 0] % 64 == 0).all()))
                        count += len(rows)
                    for (rows,) in loader:
                        count += len(rows)
                    self.assertEqual(count, 2 * len(of_memory))
                    self.assertEqual(loader.report().values["arrays"][0]["transfer"], "kernel")

    def test_pytorch_shares_the_memory(self):
        rows, labels = next(iter(pinflow.Loader(self.path, np.arange(ROWS, dtype=np.float32), batch=BATCH)))
        self.assertEqual(rows.device, "cuda:0")
        tensor = rows.torch()
        self.assertEqual(tensor.data_ptr(), rows.__cuda_array_interface__["data"][0])
        self.assertEqual((tensor.dtype, tuple(tensor.shape)), (torch.int64, (BATCH, WIDTH)))
        self.assertEqual(tensor.data_ptr(), torch.from_dlpack(rows).data_ptr())
        self.assertEqual(tensor.data_ptr(), torch.as_tensor(rows, device="cuda").data_ptr())
        self.assertEqual(labels.torch().dtype, torch.float32)
        np.testing.assert_array_equal(tensor[:, 0].cpu().numpy(), labels.torch().cpu().numpy().astype(np.int64))

    def test_a_pinned_tensor_is_read_in_place_and_stays_pinned(self):
        for count in (16_384, 16_385):  # of 4 KiB, so that the second one does not end with PyTorch's allocation
            values = torch.arange(count).repeat_interleave(1024).reshape(count, 1024).int().pin_memory()
            for _ in range(2):
                with pinflow.Loader(values, batch=1024, order="shuffled") as loader:
                    for _ in range(3):
                        for rows, in loader:
                            tensor = rows.torch()
                            self.assertTrue(torch.equal(tensor, tensor[:, :1].expand_as(tensor)))
                    self.assertIn(loader.report().values["arrays"][0]["transfer"], ("copy engine", "kernel"))
            self.assertTrue(values.is_pinned())
            self.assertTrue(torch.equal(values.cuda().cpu(), values))

    def test_numpy_is_refused_with_a_sentence(self):
        (rows,) = next(iter(pinflow.Loader(self.path)))
        with self.assertRaisesRegex(pinflow.InvalidArgument, r"use \.torch\(\)"):
            rows.numpy()

    def keep(self, take, drop):
        """Takes five epochs of 200 batches. Keeps the tensors of the last three batches, hands older ones to `drop`."""
        loader = pinflow.Loader(self.path, batch=BATCH, epochs=5)
        kept = deque()
        count = 0
        for _ in range(5):
            for batch in loader.batches():
                kept.append((take(batch[0]), np.array(batch.row_ids)))
                batch.release()
                count += 1
                if len(kept) > 3:
                    drop(*kept.popleft())
        while kept:
            drop(*kept.popleft())
        self.assertEqual(count, 1000)

    def test_tensors_kept_for_three_batches_keep_their_rows(self):
        self.keep(lambda rows: rows.torch(), self.assert_rows)

    def test_tensors_may_be_dropped_on_another_thread(self):
        handed = queue.Queue(maxsize=2)
        failures = []

        def drop_all():
            for tensor, ids in iter(handed.get, None):
                try:
                    self.assert_rows(tensor, ids)
                except BaseException as failure:
                    failures.append(failure)
                del tensor

        thread = threading.Thread(target=drop_all, daemon=True)
        thread.start()
        try:
            self.keep(lambda rows: rows.torch(), lambda tensor, ids: handed.put((tensor, ids)))
        finally:
            handed.put(None)
            thread.join()
        self.assertEqual(failures, [])

    def test_tensors_in_reference_cycles_are_collected(self):
        dropped = 0

        def drop(tensor, ids):
            nonlocal dropped
            self.assert_rows(tensor.torch(), ids)
            cycle = [tensor, tensor.torch()]
            cycle.append(cycle)
            dropped += 1
            if dropped % 2 == 0:  # the loader has slots for more than these
                del tensor, cycle
                gc.collect()

        self.keep(lambda rows: rows, drop)

    def test_the_process_may_end_while_tensors_are_kept(self):
        code = ("import sys, torch, pinflow\n"
                "loader = pinflow.Loader(sys.argv[1], batch=20)\n"
                "loop = iter(loader)\n"
                "kept = [next(loop)[0].torch() for _ in range(3)]\n"
                "other = next(loop)[0]\n"
                "print(sum(int(each.sum()) for each in kept) > 0)\n")
        for end in ("", "del loader, loop\n", "sys.exit(3)\n"):
            result = run_python(code + end, self.path)
            self.assertEqual((result.returncode, result.stdout, result.stderr), (3 if "exit" in end else 0, "True\n", ""))

    def test_a_side_stream_of_pytorch_is_waited_for(self):
        side = torch.cuda.Stream()
        sums, expected = [], []
        with torch.cuda.stream(side):
            for batch in pinflow.Loader(self.path, batch=BATCH, slots=2).batches():
                torch.cuda._sleep(300_000)  # without a wait for this stream, the slot is refilled too early
                sums.append(batch[0].torch().sum())
                expected.append(int(batch.row_ids.sum()) * WIDTH)
                batch.release()
        self.assertEqual([int(each) for each in sums], expected)

    def test_a_stream_can_be_given_and_another_named(self):
        consumer, other = torch.cuda.Stream(), torch.cuda.Stream()
        sums, expected = [], []
        for batch in pinflow.Loader(self.path, batch=BATCH, slots=2, stream=consumer).batches():
            with torch.cuda.stream(consumer):
                tensor = batch[0].torch()
            batch.used_on(other)
            with torch.cuda.stream(other):
                torch.cuda._sleep(300_000)
                sums.append(tensor.sum())
            expected.append(int(batch.row_ids.sum()) * WIDTH)
            del tensor
            batch.release()
        self.assertEqual([int(each) for each in sums], expected)

    @unittest.skipIf(cupy is None, "needs CuPy")
    def test_cupy_shares_the_memory(self):
        with cupy.cuda.Stream():
            for batch in pinflow.Loader(self.path, batch=BATCH).batches():
                array = batch[0].cupy()
                self.assertEqual(array.data.ptr, batch[0].__cuda_array_interface__["data"][0])
                self.assertEqual(int(array.sum()), int(batch.row_ids.sum()) * WIDTH)

    @unittest.skipIf(jax is None, "needs JAX")
    def test_jax_shares_the_memory(self):
        for batch in pinflow.Loader(np.zeros((ROWS, WIDTH), np.float32) + np.arange(ROWS, dtype=np.float32)[:, None],
                                    batch=BATCH, order="sequential").batches():
            array = batch[0].jax()
            self.assertEqual(array.unsafe_buffer_pointer(), batch[0].__cuda_array_interface__["data"][0])
            np.testing.assert_array_equal(np.asarray(array)[:, 0], batch.row_ids)


class MemoryTest(CudaTest):
    def test_memory_stays_flat_while_loaders_start_and_stop(self):
        def start_and_stop(count):
            for _ in range(count):
                with pinflow.Loader(self.path, batch=BATCH) as loader:
                    next(iter(loader))[0].torch()
            gc.collect()
            torch.cuda.synchronize()
            return resident_bytes(), torch.cuda.mem_get_info()[0]

        starts = int(os.environ.get("PINFLOW_STARTS", "200"))
        resident, free = start_and_stop(max(50, starts // 10))
        resident_later, free_later = start_and_stop(starts)
        self.assertLess(resident_later - resident, 8 << 20)
        self.assertLess(free - free_later, 4 << 20)

    def test_import_makes_no_context(self):
        code = ("import ctypes, sys, pinflow\n"
                "driver, active = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(-1)\n"
                "assert driver.cuInit(0) == 0\n"
                "assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(ctypes.c_uint()), ctypes.byref(active)) == 0\n"
                "print(active.value, 'torch' in sys.modules, 'numpy' in sys.modules)\n")
        result = run_python(code)
        self.assertEqual((result.stdout, result.stderr), ("0 False False\n", ""))


class TableTest(CudaTest):
    def test_rows_travel_to_the_device_and_back(self):
        weights = numbered(ROWS, WIDTH).astype(np.float32)
        table = pinflow.RowTable(weights)
        self.assertEqual(table.device, "cuda:0")
        ids = np.random.default_rng(0).permutation(ROWS)[:500]
        for given in (ids, torch.from_numpy(ids), torch.from_numpy(ids).cuda(), list(map(int, ids))):
            rows = table.gather(given)
            self.assertEqual((rows.device.type, rows.dtype), ("cuda", torch.float32))
            np.testing.assert_array_equal(rows.cpu().numpy(), weights[ids])
        out = torch.empty(len(ids), WIDTH, device="cuda")
        self.assertIs(table.gather(ids, out=out), out)
        table.scatter(ids, out + 0.5)
        torch.cuda.synchronize()
        self.assertEqual(float(weights[ids[0], 0]), ids[0] + 0.5)
        self.assertEqual(int((weights[:, 0] % 1 == 0.5).sum()), len(ids))

    def test_scatter_writes_a_tensor_of_pytorch_in_place(self):
        weights = torch.zeros(ROWS, WIDTH)
        table = pinflow.RowTable(weights)
        table.scatter([7, 7, 9], torch.ones(3, WIDTH, device="cuda"), duplicates="sum")
        torch.cuda.synchronize()
        self.assertEqual([float(weights[row, 5]) for row in (7, 8, 9)], [2.0, 0.0, 1.0])

    def test_indices_on_the_device_are_checked_there(self):
        table = pinflow.RowTable(numbered(ROWS, WIDTH))
        table.gather(torch.tensor([1, ROWS], device="cuda"))
        torch.cuda.synchronize()
        with self.assertRaises(pinflow.InvalidArgument):
            table.check()
        with self.assertRaises(pinflow.InvalidArgument):
            table.gather([ROWS])

    def test_calls_follow_the_current_stream(self):
        weights = numbered(ROWS, WIDTH)
        table = pinflow.RowTable(weights)
        with torch.cuda.stream(torch.cuda.Stream()):
            rows = torch.zeros(1, WIDTH, dtype=torch.int64, device="cuda")
            torch.cuda._sleep(5_000_000)
            rows += 42
            table.scatter([3], rows)
            again = table.gather(torch.tensor([3], device="cuda"))
            self.assertEqual(int(again.sum()), 42 * WIDTH)
        self.assertEqual(int(weights[3, 0]), 42)


if __name__ == "__main__":
    unittest.main()
