"""Descriptions of runs in one line."""

from equipoise.training.run_list import method_of


def test_a_method_is_named_by_its_topology_and_its_correction_if_it_has_one() -> None:
    plain = {"model": "vgg_c", "data": {"name": "cifar10"}, "topology": "set-itop"}
    assert method_of(plain) == "vgg_c on cifar10, set-itop"
    assert method_of(plain | {"correction": {"name": "agent", "gamma": 1}}) == "vgg_c on cifar10, set-itop with agent"
    assert method_of({}) == "small on digits, dense"
