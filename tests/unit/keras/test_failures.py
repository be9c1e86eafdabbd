"""Which errors of TensorFlow mean that the group broke: Horovod's alone, by their text."""

from __future__ import annotations

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_ft.keras.failures import failures, is_failure

DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
READ = "[gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:22244: Connection reset by peer"
HOROVODS = {
    "graph": f"Graph execution error:\n\nDetected at node mine defined at (most recent call last):\n{DOWN}\n\t "
    "[[{{node mine}}]] [Op:__inference_h_17]",
    "eager": f"{{{{function_node __wrapped__HorovodAllgather_device_/job:a}}}} {DOWN} [Op:HorovodAllgather] name: ",
    "released, graph": f"Graph execution error:\n\nDetected at node Call/HorovodAllreduce.gradient.a "
    f"defined at (most recent call last):\n{READ}\n\t [[{{{{node HorovodAllreduce.gradient.a}}}}]]",
    "released, grouped": f"{READ}\n\t [[{{{{node while/body/HorovodGroupedAllreduce_a}}}}]]",
    "released, eager": f"{{{{function_node __wrapped__HorovodBroadcast_device_/job:localhost}}}} {READ}",
}
FOREIGN = {
    "python function": "ValueError: no such file\nTraceback (most recent call last):\n\n  "
    'File "/home/me/horovod-examples/Horovod/train.py", line 3, in read\n\n\t [[{{node EagerPyFunc}}]]',
    "defined in our file": "Graph execution error:\n\nDetected at node Add defined at (most recent call last):\n  "
    'File "/lib/horovod_ft/keras/optimizer.py", line 7, in apply\n\nbad\n\t [[{{node Add}}]]',
    "empty": "",
}
KINDS = [tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.CancelledError]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", HOROVODS.values(), ids=HOROVODS.keys())
def test_a_broken_group_is_horovods_error(kind: type[tf.errors.OpError], text: str) -> None:
    error = kind(None, None, text)
    assert is_failure(error)
    with pytest.raises(HorovodInternalError) as caught, failures():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN.keys())
def test_an_unknown_error_of_the_users_goes_on_as_it_is(text: str) -> None:
    error = tf.errors.UnknownError(None, None, text)
    assert not is_failure(error)
    with pytest.raises(tf.errors.UnknownError) as caught, failures():
        raise error
    assert caught.value is error


def test_a_mistake_of_the_users_is_no_broken_group() -> None:
    text = "Mismatched allreduce tensor shapes [Op:HorovodAllreduce]"
    assert not is_failure(tf.errors.FailedPreconditionError(None, None, text))
    assert not is_failure(tf.errors.InvalidArgumentError(None, None, text))


def test_horovods_own_error_is_passed_on() -> None:
    error = HorovodInternalError("gone")
    assert is_failure(error)
    with pytest.raises(HorovodInternalError) as caught, failures():
        raise error
    assert caught.value is error


def test_without_an_error_nothing_happens() -> None:
    with failures():
        pass
