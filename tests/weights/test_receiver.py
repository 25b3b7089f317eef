# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from verl_digen.weights.checksum import checksum
from verl_digen.weights.receiver import WeightReceiver


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def update(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in module.state_dict().items()}


def stage(receiver, *buckets):
    take = receiver.begin_staged(torch.device("cpu"))
    for bucket in buckets:
        take(list(bucket.items()))


def seal_and_switch(receiver, sent):
    receiver.seal(checksum(sent.values()))
    receiver.switch()


spoiled = pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda new: new.pop("1.bias"), "1 tensors are missing from the update: 1.bias"),
        (lambda new: new.update(extra=torch.ones(1)), "unknown to the replica: extra"),
        (lambda new: new.update({"0.bias": torch.ones(9)}), r"0.bias \(9,\) != \(4,\)"),
    ],
)


@spoiled
def test_a_wrong_update_is_an_error_that_names_the_tensor_and_changes_nothing(spoil, message):
    module = network()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    new = update(module)
    spoil(new)
    receiver = WeightReceiver(module, None)
    stage(receiver, new)
    with pytest.raises(RuntimeError, match=message):
        seal_and_switch(receiver, new)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    good = update(module)
    stage(receiver, good)
    seal_and_switch(receiver, good)


def test_a_lost_bucket_and_one_that_comes_twice_are_errors():
    module = network()
    receiver = WeightReceiver(module, None)
    new = update(module)
    stage(receiver, dict(list(new.items())[:2]))
    with pytest.raises(RuntimeError, match=r"2 tensors are missing from the update: 1\.bias, 1\.weight"):
        receiver.seal(0)
    with pytest.raises(RuntimeError, match=r"4 tensors came twice: 0\.weight.*old weights keep serving"):
        stage(receiver, new, new)
    take = receiver.begin_live()
    take(list(new.items()))
    with pytest.raises(RuntimeError, match=r"4 tensors came twice: 0\.weight"):
        take(list(new.items()))
    for take in (receiver.begin_staged(torch.device("cpu")), receiver.begin_live()):
        with pytest.raises(RuntimeError, match=r"1 tensors came twice: 0\.weight"):
            take([*new.items(), ("0.weight", new["0.weight"])])


def test_a_live_update_is_loaded_as_it_arrives_and_the_network_is_whole_at_the_switch():
    module = network()
    receiver = WeightReceiver(module, None)
    new = update(module)
    take = receiver.begin_live()
    for named in new.items():
        with pytest.raises(RuntimeError, match="serves nothing until a whole update has come"):
            receiver.require_whole()
        take([named])
        assert torch.equal(module.state_dict()[named[0]], named[1])
    receiver.seal(checksum(new.values()))
    assert receiver.is_sealed and not receiver.is_whole
    receiver.switch()
    receiver.require_whole()
    assert not receiver.is_sealed
    assert all(map(torch.equal, receiver.lose(), module.state_dict().values()))
    with pytest.raises(RuntimeError, match="has not come since the last sleep"):
        receiver.require_whole()


@spoiled
def test_after_a_wrong_live_update_nothing_serves_until_a_whole_one_has_come(spoil, message):
    module = network()
    receiver = WeightReceiver(module, None)
    good = update(module)
    wrong = dict(good)
    spoil(wrong)
    with pytest.raises(RuntimeError, match=message + ".*serves nothing"):
        receiver.begin_live()(list(wrong.items()))
        receiver.seal(0)
    assert not receiver.is_whole
    receiver.begin_live()(list(good.items())[:3])  # interrupted
    assert not receiver.is_whole
    receiver.begin_live()(list(good.items()))
    seal_and_switch(receiver, good)
    assert receiver.is_whole and all(torch.equal(tensor, good[name]) for name, tensor in module.state_dict().items())


def test_an_adapter_computes_in_the_dtype_of_its_network():
    config = LoraConfig(r=2, target_modules=["0"])
    receiver = WeightReceiver(network().bfloat16(), config)
    assert {parameter.dtype for parameter in receiver.module.parameters()} == {torch.bfloat16}


def test_an_adapter_update_changes_the_adapter_alone_and_a_full_one_is_refused():
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    receiver = WeightReceiver(network(), config)
    base = receiver.module.get_parameter("base_model.model.0.base_layer.weight").clone()
    sender = get_peft_model(network(), config)
    adapter = {name: torch.randn_like(tensor) for name, tensor in get_peft_model_state_dict(sender).items()}
    stage(receiver, adapter)
    seal_and_switch(receiver, adapter)
    loaded = get_peft_model_state_dict(receiver.module)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in adapter.items())
    assert torch.equal(base, receiver.module.get_parameter("base_model.model.0.base_layer.weight"))
    full = update(network())
    stage(receiver, full)
    with pytest.raises(RuntimeError, match="are missing from the update"):
        seal_and_switch(receiver, full)


def test_an_adapter_that_wraps_no_layer_is_refused():
    with pytest.raises((RuntimeError, ValueError), match="nowhere"):
        WeightReceiver(network(), LoraConfig(r=2, target_modules=["nowhere"]))


def test_an_update_without_tensors_is_an_error():
    receiver = WeightReceiver(network(), None)
    with pytest.raises(RuntimeError, match="begin one first"):
        receiver.seal(0)
    stage(receiver)
    with pytest.raises(RuntimeError, match="4 tensors are missing from the update"):
        seal_and_switch(receiver, {})


class HandsOutCopies(nn.Sequential):
    """A network whose `state_dict` holds copies of the tensors it computes with."""

    def state_dict(self, *args, **kwargs):
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


def load(receiver, new, *, is_live):
    if is_live:
        receiver.begin_live()(list(new.items()))
    else:
        stage(receiver, new)
    seal_and_switch(receiver, new)


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "staged"])
def test_numbers_that_do_not_reach_the_network_are_an_error_and_nothing_serves(is_live):
    module = HandsOutCopies(nn.Linear(3, 4), nn.Linear(4, 2))
    receiver = WeightReceiver(module, None)
    held, sent = checksum(module.state_dict().values()), update(module)
    with pytest.raises(RuntimeError, match=f"{checksum(sent.values()):x} did not reach the network, .* holds {held:x}"):
        load(receiver, sent, is_live=is_live)
    with pytest.raises(RuntimeError, match="serves nothing"):
        receiver.require_whole()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "staged"])
def test_one_number_of_an_adapter_that_does_not_reach_its_layer_is_an_error(is_live, monkeypatch):
    receiver = WeightReceiver(network(), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    sent = {name: tensor + 1 for name, tensor in get_peft_model_state_dict(receiver.module).items()}
    load(receiver, sent, is_live=is_live)
    copy, name = torch.Tensor.copy_, next(name for name in sent if "lora_B" in name)

    def lose_one(self, source, *args, **kwargs):
        copy(self, source, *args, **kwargs)
        if self.shape == sent[name].shape and self.requires_grad is False:
            self[0, 0] += 1
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", lose_one)
    with pytest.raises(RuntimeError, match="did not reach the network"):
        load(receiver, sent, is_live=is_live)


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "staged"])
def test_an_update_may_be_cast_to_the_dtype_of_the_network(is_live):
    module = network().bfloat16()
    receiver = WeightReceiver(module, None)
    sent = {name: torch.randn(tensor.shape) for name, tensor in module.state_dict().items()}
    load(receiver, sent, is_live=is_live)
    assert all(torch.equal(tensor, sent[name].bfloat16()) for name, tensor in module.state_dict().items())
