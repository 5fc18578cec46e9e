"""Tests of the embedding table, on each device. They need PyTorch."""

import copy
import gc
import os
import pickle
import tempfile
import threading
import unittest
import weakref

import numpy as np

import pinflow

try:
    import torch
except ImportError:
    torch = None

DEVICES = ["host"]
if torch is not None and torch.cuda.is_available():
    DEVICES.append("cuda:0")


def on(device):
    return "cpu" if device == "host" else device


@unittest.skipIf(torch is None, "PyTorch is not installed")
class EmbeddingTableTest(unittest.TestCase):
    def test_rules_follow_torch_if_every_row_is_in_each_batch(self):
        for device in DEVICES:
            for rule, made, settings in (("sparse_adam", torch.optim.SparseAdam, {"lr": 0.01}),
                                         ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95)}),
                                         ("adagrad", torch.optim.Adagrad, {}),
                                         ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
                with self.subTest(device=device, rule=rule):
                    torch.manual_seed(3)
                    table = pinflow.EmbeddingTable(20, 6, optimizer=rule, weights=("normal", 0, 1), seed=5, device=device,
                                                   **settings)
                    theirs = torch.nn.Embedding(20, 6, sparse=rule == "sparse_adam")
                    with torch.no_grad():
                        theirs.weight.copy_(table.weights(np.arange(20)))
                    optimizer = made(theirs.parameters(), **settings)
                    ours = table.module()
                    wanted = torch.randn(40, 6)
                    for _ in range(5):
                        ids = torch.cat([torch.randperm(20), torch.randint(0, 20, (20,))])
                        ((ours(ids) - wanted.to(on(device))) ** 2).sum().backward()
                        table.step()
                        optimizer.zero_grad()
                        ((theirs(ids) - wanted) ** 2).sum().backward()
                        optimizer.step()
                    difference = (table.weights(np.arange(20)) - theirs.weight.detach()).abs().max().item()
                    self.assertLess(difference, 1e-5)

    def test_rowwise_adagrad_has_one_sum_for_each_row(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(8, 150, optimizer="rowwise_adagrad", lr=0.1, eps=1e-6,
                                               weights=("normal", 0, 1), device=device)
                weights, sums = table.weights(range(8)), torch.zeros(8, 1)
                for _ in range(4):
                    gradients = torch.randn(8, 150)
                    table.commit(table.fetch(range(8)), gradients.to(on(device)))
                    sums += gradients.pow(2).mean(dim=1, keepdim=True)
                    weights -= 0.1 * gradients / (sums.sqrt() + 1e-6)
                self.assertLess((table.weights(range(8)) - weights).abs().max().item(), 1e-5)
        with self.assertRaises(pinflow.InvalidArgument):
            pinflow.FlatParameters([torch.nn.Parameter(torch.zeros(3))], rule="rowwise_adagrad", lr=0.1)

    def test_accumulated_gradients_are_one_step(self):
        for device in DEVICES:
            with self.subTest(device=device):
                tables = [pinflow.EmbeddingTable(30, 4, weights=("uniform", -1, 1), seed=2, device=device)
                          for _ in range(2)]
                ids = np.array([3, 7, 3, 29, 0, 7])
                whole, parts = (table.module() for table in tables)
                whole(ids).square().sum().backward()
                self.assertEqual(len(tables[0].gradients), 1)
                for part in np.split(ids, 3):
                    parts(part).square().sum().backward()
                self.assertEqual(len(tables[1].gradients), 3)
                for table in tables:
                    table.step()
                    self.assertEqual(table.gradients, [])
                first, second = (table.weights(np.arange(30)) for table in tables)
                self.assertTrue(torch.equal(first, second))

    def test_gradients_can_be_changed_or_dropped_before_the_step(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 2, optimizer="sgd", lr=1.0, device=device)
                module = table.module()
                module([1, 2]).sum().backward()
                table.zero_grad()
                table.step()
                self.assertEqual(table.weights(np.arange(10)).abs().sum().item(), 0)
                module([1, 2]).sum().backward()
                for gradient in table.gradients:
                    gradient.mul_(0.5)
                table.step()
                self.assertEqual(table.weights([2]).tolist(), [[-0.5, -0.5]])

    def test_without_training_nothing_is_held(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 3, weights=("normal", 0, 1), device=device, look_ahead=0)
                module = table.module()
                for _ in range(20):
                    with torch.no_grad():
                        rows = module(torch.tensor([[1, 2], [3, 1]]))
                    self.assertEqual(tuple(rows.shape), (2, 2, 3))
                    self.assertTrue(torch.equal(rows.cpu().view(4, 3), table.weights([1, 2, 3, 1])))
                module.eval()
                self.assertFalse(module([5]).requires_grad)
                module.train().requires_grad_(False)
                self.assertFalse(module([5]).requires_grad)
                self.assertEqual(table.gradients, [])

    def test_lookups_without_gradients_return_the_weights(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(50, 3, weights=("normal", 0, 1), device=device)
                module = table.module().eval()
                for ids in (torch.tensor([[4, 0], [4, 49]]), torch.tensor(7), torch.zeros(0, dtype=torch.int64), [[1], [2]],
                            np.array([3, 3], np.int32)):
                    numbers = np.asarray(ids)
                    for prefetches in (False, True):
                        if prefetches:
                            table.prefetch(numbers.reshape(-1))
                        found = module(ids)
                        self.assertEqual(tuple(found.shape), (*numbers.shape, 3))
                        self.assertEqual(found.device, torch.device(on(device)))
                        self.assertFalse(found.requires_grad)
                        torch.testing.assert_close(found.cpu().reshape(-1, 3), table.weights(numbers.reshape(-1)),
                                                   rtol=0, atol=0)
                    if numbers.size != 0:
                        found.fill_(9)  # a tensor of its own
                        self.assertTrue((table.weights(numbers.reshape(-1)) != 9).all())
                    table.cancel_prefetches()
                for wrong in ([50], [-1]):
                    with self.assertRaisesRegex(pinflow.InvalidArgument, "50 rows|below 50|out of range"):
                        module(wrong)

    def test_fetch_and_commit_by_hand_with_prefetch(self):
        for device in DEVICES:
            for dtype in ("float32", "float16", "bfloat16"):
                with self.subTest(device=device, dtype=dtype):
                    table = pinflow.EmbeddingTable(100, 8, dtype=dtype, optimizer="sgd", lr=1.0, device=device,
                                                   device_rows=20)
                    batches = [np.random.default_rng(i).integers(0, 100, 50) for i in range(6)]
                    counts = np.zeros(100)
                    table.prefetch(batches[0])
                    for i, ids in enumerate(batches):
                        lease = table.fetch(ids)
                        if i + 1 < len(batches):
                            table.prefetch(batches[i + 1])
                        self.assertEqual(lease.ids.tolist(), sorted(set(ids.tolist())))
                        self.assertEqual(tuple(lease.weights.shape), (len(lease.ids), 8))
                        found = lease.weights[lease.positions][:, 0].float().cpu().numpy()
                        np.testing.assert_array_equal(found, -counts[ids])
                        table.commit(lease, torch.ones(50, 8, dtype=lease.weights.dtype, device=on(device)))
                        np.add.at(counts, ids, 1)
                    np.testing.assert_array_equal(table.weights(np.arange(100))[:, 3].float().numpy(), -counts)

    def test_rows_are_written_back_for_an_optimizer_of_ones_own(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 3, device=device)
                lease = table.fetch([4, 2])
                lease.weights.copy_(torch.tensor([[1., 2, 3], [4, 5, 6]]))
                table.write_back(lease)
                self.assertEqual(table.weights([2, 4, 5]).tolist(), [[1, 2, 3], [4, 5, 6], [0, 0, 0]])

    def test_wrong_arguments_are_refused(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 3, device=device, max_batch_ids=4)
                for ids in ([10], [-1], [1, 2, 3, 4, 5], [0.5]):
                    with self.assertRaises(pinflow.InvalidArgument):
                        table.fetch(ids)
                with self.assertRaisesRegex(pinflow.InvalidArgument, "12"):
                    table.weights([12])
                lease = table.fetch([1, 2])
                with self.assertRaisesRegex(pinflow.InvalidArgument, "shape"):
                    table.commit(lease, torch.ones(3, 3, device=on(device)))
                table.commit(lease, torch.ones(2, 3, device=on(device)))
                with self.assertRaises(pinflow.InvalidArgument):
                    table.commit(lease, torch.ones(2, 3, device=on(device)))
                with self.assertRaises(pinflow.InvalidArgument):
                    lease.weights
                with self.assertRaises(pinflow.Unsupported):
                    pinflow.EmbeddingTable(10, 3, dtype="float64", device=device)
                with self.assertRaisesRegex(pinflow.InvalidArgument, "no rule"):
                    pinflow.EmbeddingTable(10, 3, optimizer="lion", device=device)
                with self.assertRaisesRegex(pinflow.InvalidArgument, "lr_decay"):
                    pinflow.EmbeddingTable(10, 3, lr_decay=1, device=device)
                with self.assertRaisesRegex(pinflow.InvalidArgument, "poisson"):
                    pinflow.EmbeddingTable(10, 3, weights="poisson", device=device)

    @unittest.skipIf(len(DEVICES) == 1, "there is no GPU")
    def test_ids_on_the_gpu_give_the_same_bits_as_ids_in_host_memory(self):
        tables = [pinflow.EmbeddingTable(500, 6, weights=("normal", 0, 1), device=DEVICES[1], device_rows=100,
                                         max_batch_ids=4096, look_ahead=2) for _ in range(2)]
        modules = [table.module() for table in tables]
        for step in range(5):
            for part in range(1 + step % 3):  # accumulated gradients; some ids of a step are in host memory
                ids = torch.randint(0, 500, (40, 20), generator=torch.Generator().manual_seed(10 * step + part))
                on_gpu = ids.to(DEVICES[1], torch.int32 if step == 1 else torch.int64)
                rows = [modules[0](ids), modules[1](ids if part == 1 else on_gpu)]
                self.assertEqual(tuple(rows[1].shape), (40, 20, 6))
                self.assertTrue(torch.equal(*rows))
                for each in rows:
                    each.square().sum().backward()
                del on_gpu
            for table in tables:
                table.step()
        every_id = np.arange(500)
        self.assertTrue(torch.equal(tables[0].weights(every_id), tables[1].weights(every_id)))

    @unittest.skipIf(len(DEVICES) == 1, "there is no GPU")
    def test_ids_on_the_gpu_give_a_lease_with_room_for_all_and_the_count_on_the_gpu(self):
        table = pinflow.EmbeddingTable(100, 3, weights=("uniform", -1, 1), device=DEVICES[1])
        ids = torch.tensor([7, 3, 7, 99, 3], device=DEVICES[1])
        lease = table.fetch(ids)
        self.assertEqual(tuple(lease.weights.shape), (5, 3))
        self.assertEqual(lease.count.item(), 3)
        self.assertEqual(lease.ids[:3].tolist(), [3, 7, 99])
        self.assertEqual(lease.positions.tolist(), [1, 0, 1, 2, 0])
        self.assertTrue(torch.equal(lease.weights[lease.positions].cpu(), table.weights(ids.cpu())))
        lease.weights[:3] = torch.arange(9., device=DEVICES[1]).view(3, 3)
        table.write_back(lease)
        self.assertEqual(table.weights([7]).tolist(), [[3, 4, 5]])
        lease = table.fetch([5, 5])
        self.assertEqual(lease.count, 1)

    def test_ids_may_change_between_the_lookup_and_the_step(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 1, optimizer="sgd", lr=1.0, device=device)
                module = table.module()
                ids = torch.tensor([1, 2], device=on(device))
                for number in (3, 4):  # two passes: the step looks up their ids again
                    module(ids).sum().backward()
                    ids.fill_(number)
                table.step()
                self.assertEqual(table.weights(range(10))[:, 0].tolist(), [0, -1, -1, -2, 0, 0, 0, 0, 0, 0])

    @unittest.skipIf(len(DEVICES) == 1, "there is no GPU")
    def test_wrong_ids_on_the_gpu_are_refused_or_found_later(self):
        table = pinflow.EmbeddingTable(10, 3, device=DEVICES[1])
        before = table.weights(range(10))
        lease = table.fetch(torch.tensor([1, 10, -1], device=DEVICES[1]))
        self.assertEqual(lease.count.item(), 0)
        with self.assertRaisesRegex(pinflow.InvalidArgument, r"2 of 3 ids.*ids\[1\] = 10"):
            table.commit(lease, torch.ones(3, 3, device=DEVICES[1]))
        table.synchronize()
        self.assertTrue(torch.equal(table.weights(range(10)), before))
        module = table.module()
        module(torch.tensor([1, 10], device=DEVICES[1])).sum().backward()
        torch.cuda.synchronize()
        with self.assertRaisesRegex(pinflow.InvalidArgument, "1 of 2 ids"):
            table.step()
        self.assertEqual(table.gradients, [])
        # the next lookup raises the error, too, and the pass with wrong ids is dropped
        module(torch.tensor([1, 10], device=DEVICES[1])).sum().backward()
        torch.cuda.synchronize()
        with self.assertRaisesRegex(pinflow.InvalidArgument, "1 of 2 ids"):
            module(torch.tensor([1, 2], device=DEVICES[1]))
        self.assertEqual(table.gradients, [])
        module(torch.tensor([1, 2], device=DEVICES[1])).sum().backward()
        table.step()
        self.assertFalse(torch.equal(table.weights([1, 2]), before[1:3]))
        with self.assertRaisesRegex(pinflow.InvalidArgument, "whole numbers"):
            table.fetch(torch.tensor([1.0], device=DEVICES[1]))
        with self.assertRaises(pinflow.Unsupported):
            table.prefetch(torch.tensor([1], device=DEVICES[1]))
        with self.assertRaisesRegex(pinflow.InvalidArgument, "in host memory"):
            pinflow.EmbeddingTable(10, 3, device="host").fetch(torch.tensor([1], device=DEVICES[1]))

    def test_leases_and_views_outlive_the_table(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 3, weights=("uniform", 1, 1), device=device)
                weights = table.fetch([1, 2]).weights
                lease = table.fetch([3])
                del table
                self.assertEqual(weights.sum().item(), 6)
                del lease, weights

    def test_a_retained_graph_makes_two_steps(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 2, optimizer="sgd", lr=1.0, device=device)
                loss = table.module()([1, 1, 2]).sum()
                for _ in range(2):
                    loss.backward(retain_graph=True)
                    table.step()
                loss.backward(retain_graph=True)
                loss.backward()
                for gradient in table.gradients:
                    gradient.mul_(0.5)
                table.step()
                self.assertEqual(table.weights([1, 2])[:, 0].tolist(), [-6, -3])

    def test_a_second_backward_pass_is_refused_unless_the_graph_is_retained(self):
        table = pinflow.EmbeddingTable(5, 2, device="host")
        loss = table.module()([1]).sum()
        loss.backward()
        with self.assertRaisesRegex(RuntimeError, "second time"):
            loss.backward()
        self.assertEqual(len(table.gradients), 1)

    def test_a_step_that_fails_keeps_the_gradients(self):
        table = pinflow.EmbeddingTable(10, 2, optimizer="sgd", lr=1.0, device="host", max_batch_ids=3)
        module = table.module()
        for _ in range(2):
            module([1, 2]).sum().backward()
        with self.assertRaises(pinflow.InvalidArgument):
            table.step()
        self.assertEqual(len(table.gradients), 2)

    def test_weights_are_made_by_a_function_replaced_exported_and_imported(self):
        calls = []

        def numbered(first, end):
            calls.append((first, end))
            return np.arange(first, end)[:, None] * np.ones(3)

        for device in DEVICES:
            with self.subTest(device=device), tempfile.TemporaryDirectory() as folder:
                calls.clear()
                table = pinflow.EmbeddingTable(100, 3, weights=numbered, device=device, device_rows=10)
                self.assertEqual(table.weights([5, 99])[:, 0].tolist(), [5, 99])
                table.grow(150)
                self.assertEqual((len(table), calls), (150, [(0, 100), (100, 150)]))
                self.assertEqual(table.weights([149]).tolist(), [[149] * 3])
                table.set_weights([7, 140], torch.tensor([[1, 2, 3], [4, 5, 6]]))
                self.assertEqual(table.weights([140, 7]).tolist(), [[4, 5, 6], [1, 2, 3]])
                with self.assertRaises(pinflow.InvalidArgument):
                    table.set_weights([7, 140], torch.zeros(2, 4))
                path = os.path.join(folder, "weights.npy")
                table.export_weights(path)
                exported = np.load(path)
                self.assertEqual(exported.shape, (150, 3))
                self.assertEqual(exported[140].tolist(), [4, 5, 6])
                half = pinflow.EmbeddingTable(150, 3, dtype="float16", device=device)
                half.import_weights(path)
                self.assertEqual(half.weights([140]).tolist(), [[4, 5, 6]])

    def test_graphs_that_live_on_do_not_stop_a_table(self):
        for device in DEVICES:
            table = pinflow.EmbeddingTable(100, 3, weights=("normal", 0, 1), device=device)
            module = table.module()
            kept = [module([1, 2])]
            for step in range(10):
                loss = module([step, 3]).square().sum()
                loss.backward()
                if step == 2:
                    table.zero_grad()  # as a gradient scaler does
                else:
                    table.step()
                kept.append(loss)
            loss = module([4]).sum()
            loss.backward()
            table.set_weights([5], [[1, 1, 1]])
            table.grow(120)
            table.step()
            lease = table.fetch([1])
            with self.assertRaisesRegex(pinflow.AllSlotsLeased, "4 steps"):
                for _ in range(10):
                    table.commit(table.fetch([2]), torch.ones(1, 3, device=table._torch_device))
            lease.release()

    def test_embeddings_can_be_changed_in_place(self):
        for device in DEVICES:
            table = pinflow.EmbeddingTable(10, 3, optimizer="sgd", lr=1.0, weights=("uniform", -1, 1), device=device)
            before = table.weights(range(10))
            model = torch.nn.Sequential(table.module(), torch.nn.ReLU(inplace=True))
            model(torch.arange(10)).sum().backward()
            table.step()
            self.assertTrue(torch.equal(table.weights(range(10)), before - (before > 0).float()))
            for ids, shape in ((5, (3,)), ([[1, 2], [3, 4]], (2, 2, 3)), (np.zeros((2, 0), int), (2, 0, 3))):
                self.assertEqual(tuple(table.module()(ids).shape), shape)

    def test_a_table_with_gradients_is_freed_at_once(self):
        def make():
            table = pinflow.EmbeddingTable(10, 3, device="host")
            table.module()([1]).sum().backward()
            return weakref.ref(table)

        gc.disable()
        try:
            self.assertIsNone(make()())
        finally:
            gc.enable()

    def test_refused_calls_leave_lease_and_table_as_they_were(self):
        for device in DEVICES:
            table = pinflow.EmbeddingTable(10, 3, optimizer="sgd", lr=1.0, device=device)
            other = pinflow.EmbeddingTable(10, 3, device=device)
            lease = table.fetch([1, 2])
            ones = torch.ones(2, 3, device=table._torch_device)
            for call in (lambda: other.commit(lease, ones), lambda: other.write_back(lease),
                         lambda: table.commit(lease, ones[:1]), lambda: table.commit(lease, ones.to_sparse()),
                         lambda: table.commit(lease, [1]), lambda: table.commit(None, ones)):
                with self.assertRaises(pinflow.InvalidArgument):
                    call()
            table.commit(lease, ones)
            self.assertEqual(table.weights([1]).tolist(), [[-1, -1, -1]])
            masked = np.ma.array([1, 2, 5], mask=[0, 0, 1])
            for call in (lambda: table.fetch(masked), lambda: table.set_weights([3], np.ma.array([[9.0] * 3], mask=True)),
                         lambda: table.fetch([1.0]), lambda: table.fetch(torch.ones(2, dtype=torch.bfloat16)),
                         lambda: table.fetch(np.array([2**64 - 1], np.uint64)), lambda: table.fetch([True]),
                         lambda: table.set_weights([1], np.ones((1, 3), complex)), lambda: table.save("a\0b"),
                         lambda: table.load("a\0b"), lambda: table.grow(-1), lambda: table.set_rate("x")):
                with self.assertRaises(pinflow.InvalidArgument):
                    call()
            for wrong in ({"weights": "normal"}, {"weights": ("normal", 0)}, {"weights": None}, {"seed": -1},
                          {"look_ahead": 1.5}, {"optimizer": torch.optim.Adam}):
                with self.subTest(wrong), self.assertRaises(pinflow.InvalidArgument):
                    pinflow.EmbeddingTable(10, 3, device="host", **wrong)
            for call in (lambda: copy.deepcopy(table), lambda: pickle.dumps(table.module())):
                with self.assertRaisesRegex(TypeError, "`save`"):
                    call()

    def test_weights_and_gradients_of_unusual_tensors(self):
        table = pinflow.EmbeddingTable(10, 1, optimizer="sgd", lr=1.0, device="host")
        negative = torch.conj(torch.tensor([[1 + 1j]])).imag  # -1, by a bit of the tensor
        table.commit(table.fetch([3]), negative)
        table.set_weights([4], negative)
        for value in (np.array([[5]], ">f4"), np.array([[5.0], [6.0]])[::-1][1:], np.array([[True]])):
            table.set_weights([5], value)
            self.assertEqual(table.weights([5]).item(), float(value[0, 0]))
        torch.set_default_device("meta")
        try:
            self.assertEqual(table.weights([3, 4]).tolist(), [[1], [-1]])
        finally:
            torch.set_default_device(None)

    def test_a_function_of_first_weights_that_raises_is_called_again_for_the_same_rows(self):
        def numbered(first, end):
            if first >= 100 and fails:
                raise ValueError("not yet")
            return np.arange(first, end)[:, None] * np.ones(2)

        fails = True
        table = pinflow.EmbeddingTable(100, 2, weights=numbered, device="host")
        with self.assertRaisesRegex(ValueError, "not yet"):
            table.grow(150)
        fails = False
        table.grow(150)
        self.assertEqual(table.weights([99, 149])[:, 0].tolist(), [99, 149])
        with self.assertRaises(pinflow.InvalidArgument):
            pinflow.EmbeddingTable(100, 3, weights=numbered, device="host")

    def test_files_of_bfloat16_and_odd_names(self):
        with tempfile.TemporaryDirectory() as folder:
            table = pinflow.EmbeddingTable(5, 3, dtype=torch.bfloat16, weights=("normal", 0, 1), device="host")
            path = os.path.join(os.fsencode(folder), b"odd \xe9")
            table.save(os.fsdecode(path))
            table.export_weights(os.path.join(folder, "weights.npy"))
            for load in ("load", "import_weights"):
                other = pinflow.EmbeddingTable(5, 3, dtype=torch.bfloat16, device="host")
                getattr(other, load)(os.fsdecode(path) if load == "load" else os.path.join(folder, "weights.npy"))
                self.assertTrue(torch.equal(other.weights(range(5)), table.weights(range(5))))

    def test_a_loaded_table_trains_to_the_same_bits_as_the_saved_table(self):
        for device in DEVICES:
            with self.subTest(device=device), tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "table")
                tables = [pinflow.EmbeddingTable(50, 4, weights=("normal", 0, 1), seed=seed, lr=0.1, device=device)
                          for seed in (1, 2)]

                def train(table):
                    (table.module()([1, 2, 2, 49]) ** 2).sum().backward()
                    table.step()

                train(tables[0])
                tables[0].save(path)
                tables[1].load(path)
                for table in tables:
                    train(table)
                self.assertTrue(torch.equal(*(table.weights(range(50)) for table in tables)))
                other = pinflow.EmbeddingTable(50, 4, optimizer="adagrad", device=device)
                with self.assertRaises(pinflow.StateMismatch):
                    other.load(path)

    def test_grad_scaler_skips_a_step_whose_gradients_are_infinite(self):
        for device in DEVICES:
            tables = [pinflow.EmbeddingTable(10, 4, weights=("normal", 0, 1), optimizer="sgd", lr=0.5, device=device)
                      for _ in range(2)]
            scaled, plain = tables
            module, optimizer = scaled.module(), scaled.optimizer()
            where = scaled._torch_device
            scaler = torch.amp.GradScaler(where.partition(":")[0], init_scale=1024.0)
            for factor in (1.0, float("inf"), 2.0):
                scaler.scale((module([1, 2, 1]) * factor).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                self.assertEqual(scaled.gradients, [])
                if factor != float("inf"):
                    (plain.module()([1, 2, 1]) * factor).sum().backward()
                    plain.step()
            self.assertEqual(scaler.get_scale(), 512.0)
            self.assertTrue(torch.equal(scaled.weights(range(10)), plain.weights(range(10))))

    def test_the_optimizer_serves_clipping_schedulers_and_closures(self):
        for device in DEVICES:
            table = pinflow.EmbeddingTable(5, 4, optimizer="sgd", lr=1.0, device=device)
            module, optimizer = table.module(), table.optimizer()
            self.assertIsInstance(optimizer, torch.optim.Optimizer)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

            def loss():
                total = module([3]).sum()
                total.backward()
                return total

            self.assertEqual(float(optimizer.step(loss).detach()), 0.0)
            schedule.step()
            loss()
            parameters = optimizer.param_groups[0]["params"]
            self.assertEqual([tuple(each.grad.shape) for each in parameters], [(1, 4)])
            self.assertEqual(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)), 2.0)
            optimizer.step()  # half of the rate, gradients of 0.5
            torch.testing.assert_close(table.weights([3]), torch.full((1, 4), -1.25))
            optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": [{"lr": 0.25, "params": []}]})
            loss()
            optimizer.step()
            torch.testing.assert_close(table.weights([3]), torch.full((1, 4), -1.5))
            loss()
            optimizer.zero_grad()
            optimizer.step()
            torch.testing.assert_close(table.weights([3]), torch.full((1, 4), -1.5))
            table.set_rate(0.5)  # until the optimizer's lr changes
            loss()
            optimizer.step()
            torch.testing.assert_close(table.weights([3]), torch.full((1, 4), -2.0))
            optimizer.param_groups[0]["weight_decay"] = 1.0
            with self.assertRaisesRegex(pinflow.InvalidArgument, "the group has weight_decay"):
                optimizer.step()
            del optimizer.param_groups[0]["weight_decay"]
            for state in ({}, None, {"state": {}, "param_groups": [{"params": [], "lr": "x"}]},
                          {"state": {}, "param_groups": [{"params": [], "lr": float("nan")}]}):
                with self.assertRaisesRegex(pinflow.InvalidArgument, "no state"):
                    optimizer.load_state_dict(state)
            with self.assertRaises(pinflow.Unsupported):
                optimizer.add_param_group({"params": [torch.zeros(1)]})
            with self.assertRaises(pinflow.InvalidArgument):
                optimizer.load_state_dict(torch.optim.SGD([torch.zeros(1)], 0.1).state_dict())
            with self.assertRaises(TypeError):
                copy.deepcopy(optimizer)

    def test_a_prefetch_takes_the_memory_of_a_lookup_whose_graph_is_kept(self):
        for device in DEVICES:
            table = pinflow.EmbeddingTable(100, 4, device=device)
            module = table.module()
            kept = module([1, 2])
            for step in range(8):
                table.prefetch([step])
                module([step]).sum().backward()
                table.step()
            self.assertEqual(tuple(kept.shape), (2, 4))

    def test_a_lease_may_be_dropped_on_another_thread(self):
        for device in DEVICES:
            with self.subTest(device=device):
                table = pinflow.EmbeddingTable(10, 3, device=device)
                for _ in range(20):
                    leases = [table.fetch([1, 2, 3])]
                    thread = threading.Thread(target=leases.clear)
                    thread.start()
                    thread.join()


if __name__ == "__main__":
    unittest.main()
