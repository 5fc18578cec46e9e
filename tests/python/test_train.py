"""FlatParameters with PyTorch, on the CPU and on a GPU if there is one."""

import copy
import io
import tempfile
import unittest

import pinflow

try:
    import torch
except ImportError:
    torch = None


def devices():
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() and not pinflow.no_cuda_reason() else [])


def model_on(device, seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(device)


def loss_of(model, step):
    torch.manual_seed(1000 + step)
    device = next(model.parameters()).device
    return model(torch.randn(16, 7).to(device)).square().mean()


def train(model, optimizer, steps, zero=True):
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        if zero:
            optimizer.zero_grad()


@unittest.skipUnless(torch, "needs PyTorch")
class FlatParametersTest(unittest.TestCase):
    def assert_close(self, model, other):
        for a, b in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-5, atol=2e-6)

    def test_hooks_run_once_and_a_profiler_sees_the_step(self):
        model = model_on("cpu")
        optimizer = pinflow.FlatParameters(model.parameters(), "sgd", lr=0.1)
        seen = []
        before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        after = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.step()
        self.assertEqual(seen, ["before", "after"])
        before.remove()
        after.remove()
        optimizer.step()
        self.assertEqual(seen, ["before", "after"])
        self.assertEqual(optimizer.steps, 2)
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        self.assertIn("Optimizer.step#FlatParameters.step", [each.name for each in profile.function_events])

    def test_rules_for_dense_gradients_follow_torch(self):
        rules = {"sgd": "SGD", "adagrad": "Adagrad", "adadelta": "Adadelta", "rmsprop": "RMSprop", "rprop": "Rprop",
                 "adam": "Adam", "adamw": "AdamW", "adamax": "Adamax", "nadam": "NAdam", "radam": "RAdam", "asgd": "ASGD"}
        options = {"sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "adam": {"betas": (0.8, 0.9)},
                   "rprop": {"etas": (0.4, 1.3), "step_sizes": (1e-5, 1.0)}}
        for device in devices():
            for rule, name in rules.items():
                with self.subTest(rule=rule, device=device):
                    ours, theirs = model_on(device), model_on(device)
                    given = options.get(rule, {})
                    train(ours, pinflow.FlatParameters(ours.parameters(), rule, **given), 10)
                    train(theirs, getattr(torch.optim, name)(theirs.parameters(), **given), 10)
                    self.assert_close(ours, theirs)

    def test_groups_have_their_own_settings_and_a_schedule_changes_their_rates(self):
        for device in devices():
            with self.subTest(device=device):
                ours, theirs = model_on(device), model_on(device)

                def groups(model):
                    return [{"params": model[0].parameters(), "lr": 0.01},
                            {"params": [model[2].weight], "weight_decay": 0.3}, {"params": model[2].bias}]

                optimizers = [pinflow.FlatParameters(groups(ours), "adamw", lr=0.1, weight_decay=0.0),
                              torch.optim.AdamW(groups(theirs), lr=0.1, weight_decay=0.0)]
                self.assertIsInstance(optimizers[0], torch.optim.Optimizer)
                for model, optimizer in zip((ours, theirs), optimizers):
                    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
                    for step in range(6):
                        loss_of(model, step).backward()
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                self.assert_close(ours, theirs)

    def test_parameters_keep_their_values_and_become_views(self):
        for device in devices():
            with self.subTest(device=device):
                model = model_on(device)
                before = [each.detach().clone() for each in model.parameters()]
                optimizer = pinflow.FlatParameters(model.named_parameters())
                optimizer.check_views()
                for each, value in zip(model.parameters(), before):
                    self.assertTrue(torch.equal(each.detach(), value))
                    self.assertEqual(each.data_ptr() % 256, 0)
                    self.assertTrue(torch.equal(each.grad, torch.zeros_like(value)))
                self.assertIn("adam/1", repr(optimizer))

    def test_a_parameter_that_has_left_the_buffers_is_an_error(self):
        model = model_on("cpu")
        optimizer = pinflow.FlatParameters(model.named_parameters())
        train(model, optimizer, 2)
        model.zero_grad(set_to_none=True)
        with self.assertRaisesRegex(pinflow.InvalidArgument, "gradient of parameter '0.weight'"):
            optimizer.step()
        model = model_on("cpu")
        optimizer = pinflow.FlatParameters(model.named_parameters())
        model[2].bias.data = model[2].bias.data.clone()
        with self.assertRaisesRegex(pinflow.InvalidArgument, "parameter '2.bias'"):
            optimizer.step()

    def test_clipping_follows_torch(self):
        for device in devices():
            with self.subTest(device=device):
                ours, theirs = model_on(device), model_on(device)
                mine, other = pinflow.FlatParameters(ours.parameters(), "sgd", lr=1.0), None
                other = torch.optim.SGD(theirs.parameters(), lr=1.0)
                for step in range(5):
                    loss_of(ours, step).backward()
                    mine.clip_grad_norm(0.01)
                    mine.step()
                    loss_of(theirs, step).backward()
                    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
                    other.step()
                    self.assertAlmostEqual(mine.norm, norm.item(), places=6)
                    mine.zero_grad()
                    other.zero_grad()
                self.assert_close(ours, theirs)
                loss_of(ours, 9).backward()
                mine.clip_grad_value(1e-3)
                before = ours[0].bias.detach().clone()
                mine.step()
                self.assertLessEqual((ours[0].bias.detach() - before).abs().max().item(), 1.001e-3)

    def test_a_state_resumes_with_the_same_bits(self):
        for device in devices():
            with self.subTest(device=device):
                whole = model_on(device)
                optimizer = pinflow.FlatParameters(whole.parameters(), "adamw", lr=0.01)
                train(whole, optimizer, 4)
                saved = io.BytesIO()
                torch.save(optimizer.state_dict(), saved)
                with tempfile.TemporaryDirectory() as folder:
                    optimizer.save(folder + "/state.safetensors")
                    train(whole, optimizer, 3)
                    for kind in ("dict", "file"):
                        model = model_on(device, seed=2)
                        resumed = pinflow.FlatParameters(model.parameters(), "adamw", lr=0.01)
                        if kind == "dict":
                            saved.seek(0)
                            resumed.load_state_dict(torch.load(saved))
                        else:
                            resumed.load(folder + "/state.safetensors")
                        self.assertEqual(resumed.steps, 4)
                        train(model, resumed, 3)
                        for a, b in zip(whole.parameters(), model.parameters()):
                            self.assertTrue(torch.equal(a.detach(), b.detach()))
                        with self.assertRaises(pinflow.StateMismatch):
                            pinflow.FlatParameters(model.parameters(), "adam").load(folder + "/state.safetensors")

    def test_gradients_that_are_not_finite_are_skipped_or_refused(self):
        for device in devices():
            for policy in ("skip", "refuse"):
                with self.subTest(device=device, policy=policy):
                    model = model_on(device)
                    optimizer = pinflow.FlatParameters(model.parameters(), nonfinite=policy)
                    model[0].bias.grad[2] = float("nan")
                    before = model[0].bias.detach().clone()
                    optimizer.step()
                    self.assertTrue(torch.equal(model[0].bias.detach(), before))
                    self.assertEqual((optimizer.steps, optimizer.skipped), (0, 1))
                    if policy == "refuse":
                        with self.assertRaises(pinflow.Error):
                            optimizer.check()

    def test_a_grad_scaler_scales_and_skips(self):
        for device in devices():
            for clips in (None, "scaled", "unscaled"):
                with self.subTest(device=device, clips=clips):
                    model, other = model_on(device), model_on(device)
                    mine, theirs = pinflow.FlatParameters(model.parameters()), torch.optim.Adam(other.parameters())
                    scalers = [torch.amp.GradScaler(device, init_scale=2.0 ** 10) for _ in range(2)]
                    for step in range(6):
                        for each, optimizer, scaler in zip((model, other), (mine, theirs), scalers):
                            loss = loss_of(each, step)
                            if step == 2:
                                loss = loss * float("inf")
                            scaler.scale(loss).backward()
                            if clips and (optimizer is theirs or clips == "unscaled"):
                                scaler.unscale_(optimizer)
                            if clips and optimizer is theirs:
                                torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
                            elif clips:
                                mine.clip_grad_norm(0.01)
                            scaler.step(optimizer)
                            scaler.update()
                            optimizer.zero_grad()
                    self.assertEqual((mine.steps, mine.skipped), (5, 1))
                    self.assertEqual(scalers[0].get_scale(), scalers[1].get_scale())
                    self.assert_close(model, other)

    def test_frozen_parameters_are_left_alone(self):
        for device in devices():
            with self.subTest(device=device):
                model = model_on(device)
                model[0].weight.requires_grad_(False)
                before, address = model[0].weight.detach().clone(), model[0].weight.data_ptr()
                optimizer = pinflow.FlatParameters(model.parameters(), "adamw", lr=0.1, weight_decay=0.5)
                train(model, optimizer, 3)
                self.assertTrue(torch.equal(model[0].weight.detach(), before))
                self.assertEqual(model[0].weight.data_ptr(), address)
                self.assertIsNone(model[0].weight.grad)

    def test_settings_other_than_the_rate_cannot_change(self):
        model = model_on("cpu")
        optimizer = pinflow.FlatParameters(model.parameters(), "adam", lr=0.1)
        self.assertEqual(optimizer.param_groups[0]["betas"], (0.9, 0.999))
        optimizer.param_groups[0]["lr"] = 0.5
        self.assertEqual(torch.optim.lr_scheduler.StepLR(optimizer, 10).base_lrs, [0.5])
        train(model, optimizer, 1)
        optimizer.param_groups[0]["weight_decay"] = 1.0
        with self.assertRaisesRegex(pinflow.InvalidArgument, "weight_decay"):
            optimizer.step()
        with self.assertRaises(pinflow.Unsupported):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        with self.assertRaises(pinflow.Unsupported):
            copy.deepcopy(optimizer)

    def test_schedulers_may_keep_numbers_of_their_own_in_a_group(self):
        ours, theirs = model_on("cpu"), model_on("cpu")
        mine = pinflow.FlatParameters(ours.parameters(), "adam", lr=0.1)
        other = torch.optim.Adam(theirs.parameters(), lr=0.1)
        for model, optimizer in ((ours, mine), (theirs, other)):
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
            for step in range(5):
                train(model, optimizer, 1)
                schedule.step()
        self.assertIn("max_lr", mine.param_groups[0])
        self.assert_close(ours, theirs)

    def test_a_schedule_resumes_from_a_state(self):
        model = model_on("cpu")
        optimizer = pinflow.FlatParameters(model.parameters(), "adam", lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(5):
            train(model, optimizer, 1)
            schedule.step()
        state = optimizer.state_dict()
        resumed = pinflow.FlatParameters(model_on("cpu").parameters(), "adam", lr=0.1)
        resumed.load_state_dict(state)
        self.assertEqual(torch.optim.lr_scheduler.StepLR(resumed, 2, last_epoch=4).get_last_lr(), schedule.get_last_lr())

    def test_parameters_that_share_memory_or_are_not_contiguous_are_refused(self):
        one = torch.nn.Parameter(torch.zeros(4))
        two = torch.nn.Parameter(torch.zeros(4))
        two.data = one.data
        memory = torch.zeros(10)
        for parameters in ([one, two], [torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[5:])],
                           [torch.nn.Parameter(torch.zeros(3, 4).t())]):
            with self.assertRaises(pinflow.InvalidArgument):
                pinflow.FlatParameters(parameters)

    def test_one_tensor_is_no_list_of_parameters(self):
        with self.assertRaisesRegex(pinflow.InvalidArgument, "not as one tensor"):
            pinflow.FlatParameters(torch.nn.Parameter(torch.zeros(2, 2)))

    def test_parameters_may_be_parts_of_one_tensor(self):
        for device in devices():
            with self.subTest(device=device):
                memory = torch.arange(10.0, device=device)
                parts = [torch.nn.Parameter(memory[5:]), torch.nn.Parameter(memory[:5]), torch.nn.Parameter(memory[5:5])]
                optimizer = pinflow.FlatParameters(parts, "sgd", lr=1.0)
                parts[0].grad.fill_(1)
                optimizer.step()
                self.assertEqual(parts[0].tolist(), [4, 5, 6, 7, 8])
                self.assertEqual(parts[1].tolist(), [0, 1, 2, 3, 4])
                recurrent = torch.nn.LSTM(3, 4, num_layers=2).to(device)  # cuDNN has its weights in one tensor
                optimizer = pinflow.FlatParameters(recurrent.parameters(), "adam")
                recurrent(torch.ones(5, 2, 3, device=device))[0].sum().backward()
                optimizer.step()
                optimizer.check_views()

    def test_wrong_arguments_are_refused(self):
        model = model_on("cpu")
        for options in ({"rule": "adamm"}, {"momentum": 0.9}, {"lr": -1.0}, {"lr": "fast"}, {"nonfinite": "never"},
                        {"betas": 0.9}, {"betas": (0.9, 0.9, 0.9)}):
            with self.subTest(options=options), self.assertRaises(pinflow.InvalidArgument):
                pinflow.FlatParameters(model.parameters(), **options)
        with self.assertRaises(pinflow.InvalidArgument):
            pinflow.FlatParameters([])
        with self.assertRaises(pinflow.Unsupported):
            pinflow.FlatParameters([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
        with self.assertRaisesRegex(pinflow.InvalidArgument, "requires a gradient"):
            pinflow.FlatParameters(model.requires_grad_(False).parameters())
        floats = {"pinflow": torch.zeros(100), "rates": [0.1]}
        state = pinflow.FlatParameters(model_on("cpu").parameters()).state_dict()
        wrong_rates = [{**state, "rates": ["x"]}, {**state, "rates": 3}, {**state, "initial_rates": []}]
        for state in ({}, {"pinflow": None, "rates": [0.1]}, floats, None, *wrong_rates):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "no state of pinflow.FlatParameters"):
                pinflow.FlatParameters(model_on("cpu").parameters()).load_state_dict(state)

    def test_the_error_of_a_state_names_no_file(self):
        state = pinflow.FlatParameters(model_on("cpu").parameters()).state_dict()
        other = pinflow.FlatParameters([torch.nn.Parameter(torch.zeros(3))])
        with self.assertRaisesRegex(pinflow.StateMismatch, "^the state has "):
            other.load_state_dict(state)
        state["pinflow"] = state["pinflow"][:-1]
        with self.assertRaisesRegex(pinflow.FormatError, "cannot open the state: "):
            other.load_state_dict(state)

    def test_the_error_of_a_replaced_gradient_says_what_keeps_it(self):
        model = torch.nn.Linear(3, 1)
        optimizer = pinflow.FlatParameters(model.parameters())
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        with self.assertRaisesRegex(pinflow.InvalidArgument, "call the optimizer's instead"):
            optimizer.step()


if __name__ == "__main__":
    unittest.main()
