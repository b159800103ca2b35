"""The streams of a graph: the order between them, and what the allocator is told."""

from __future__ import annotations

from functools import partial

from mutant import Mutant

TESTS = (
    "tests/accelerator/test_streams.py",
    "tests/accelerator/test_order_of_streams.py",
)

EACH = {
    "src/graph/streams.cpp": r"\borderAfter\((all_\[asker|other)|\bnoteUse\(",
    "src/[rs][eae]*/*.cpp": r"\bstreams\.(use|made|share|note)\(",
}

AHEAD = "tests/accelerator/test_replays_ahead.py"
ORDER = "tests/accelerator/test_order_of_streams.py"
STREAMS = "tests/accelerator/test_streams.py"

streams = partial(Mutant, file="src/graph/streams.cpp")
replay = partial(Mutant, file="src/replay/replay.cpp")
rerun = partial(Mutant, file="src/replay/rerun.cpp")
buffers = partial(Mutant, file="src/replay/buffers.cpp")
escapes = partial(Mutant, file="src/replay/escapes.cpp")
saved_tensor = partial(Mutant, file="src/saved/saved_tensor.cpp")
placeholder = partial(Mutant, file="src/saved/placeholder.cpp")
op_recording = partial(Mutant, file="src/record/op_recording.cpp")
recorder = partial(Mutant, file="src/record/recorder.cpp")
sender = partial(Mutant, file="src/record/sender.cpp")
value_map = partial(Mutant, file="src/record/value_map.cpp")

MUTANTS = (
    streams(
        "asker-waits-for-unnumbered-makers",
        text="orderAfter(all_[asker], all_[i]);",
        tests=(f"{ORDER}::test_more_makers_than_are_told_apart",),
    ),
    streams(
        "asker-waits-for-maker", text="orderAfter(all_[asker], all_[maker - 1]);", tests=(STREAMS,)
    ),
    streams(
        "allocator-is-told-of-users", text="noteUse(storage, all_[current]);", tests=(STREAMS,)
    ),
    streams(
        "all-wait-for-what-is-shared",
        text="orderAfter(other, current);",
        tests=(f"{ORDER}::test_a_filled_escape_is_for_all_streams",),
    ),
    streams(
        "allocator-is-told-of-all",
        text="noteUse(storage, other);",
        tests=(f"{ORDER}::test_memory_of_a_filled_escape_is_used_by_the_stream_that_made_it",),
    ),
    streams(
        "made-is-remembered",
        text="value.streams.madeOn = static_cast<uint8_t>(std::min(current + 1, kLastMaker));",
        tests=(STREAMS,),
    ),
    streams(
        "made-is-not-ordered-yet",
        text="value.streams.orderedOn = 0;",
        tests=(f"{ORDER}::test_who_used_it_in_forward_waits_for_it_in_backward",),
    ),
    streams(
        "several-streams-on-a-device",
        text=(
            "several_ |= std::any_of(all_.begin(), all_.end(), [&](c10::Stream other) {\n"
            "      return other.device() == stream.device();\n"
            "    });"
        ),
        tests=(STREAMS,),
    ),
    streams(
        "only-streams-of-the-device-share",
        text="other != current && other.device() == current.device()",
        instead="other != current",
        tests=(f"{ORDER}::test_a_filled_escape_is_not_for_streams_of_another_device",),
    ),
    streams(
        "the-last-streams-have-no-bit",
        text="place < kBits - 1 ? static_cast<uint8_t>(1U << place) : 0",
        instead="static_cast<uint8_t>(1U << (place % kBits))",
        tests=(f"{ORDER}::test_more_streams_than_are_told_apart",),
    ),
    replay(
        "brought-back-is-made",
        text="graph.streams.made(value, value.home.bytes());",
        tests=(STREAMS,),
    ),
    rerun(
        "a-replay-uses-its-inputs",
        text="graph_.streams.use(*input.value, storage);",
        tests=(STREAMS,),
    ),
    buffers(
        "a-replay-uses-what-it-copies",
        text="graph_.streams.use(value, storage);",
        tests=(f"{ORDER}::test_a_replay_writes_to_a_copy_of_what_another_stream_made",),
    ),
    rerun(
        "a-replay-makes", text="graph_.streams.made(*value, value->home.bytes());", tests=(STREAMS,)
    ),
    buffers(
        "a-buffer-is-taken-on-one-stream",
        text="value.home.isPrivate() && !graph_.streams.areSeveral()",
        instead="value.home.isPrivate()",
        tests=(f"{ORDER}::test_a_replay_writes_to_a_copy_of_what_another_stream_made",),
    ),
    escapes(
        "a-filled-escape-is-used",
        text="graph.streams.use(value, bytes);",
        tests=(
            f"{AHEAD}::test_an_escape_that_was_replayed_ahead_is_for_the_stream_that_asks_first",
        ),
    ),
    escapes(
        "a-filled-escape-is-shared",
        text="graph.streams.share(bytes);",
        tests=(f"{ORDER}::test_memory_of_a_filled_escape_is_used_by_the_stream_that_made_it",),
    ),
    saved_tensor(
        "unpacked-again-is-used",
        text="graph_->streams.use(*packed_.value, unpacked_.storage());",
        tests=(f"{ORDER}::test_a_saved_tensor_that_needs_no_gradient_is_unpacked_twice",),
    ),
    saved_tensor(
        "a-placeholder-is-shared-by-all",
        text="graph_->streams.share(unpacked.storage());",
        tests=(f"{ORDER}::test_what_comes_back_where_it_was_discarded_is_for_all_streams",),
    ),
    saved_tensor(
        "redefined-is-used",
        text="graph_->streams.use(*packed_.value, packed_.value->rare->redefined);",
        tests=(STREAMS,),
    ),
    saved_tensor(
        "unpacked-is-used", text="graph_->streams.use(*packed_.value, storage);", tests=(STREAMS,)
    ),
    saved_tensor(
        "a-copy-for-recipes-is-made",
        text="graph_->streams.made(*packed_.value, packed_.value->home.bytes());",
        tests=(f"{ORDER}::test_a_copy_for_recipes_was_made_on_another_stream",),
    ),
    placeholder(
        "a-placeholder-is-shared",
        text="saved_->shareWithAllStreams(tensor);",
        tests=(f"{ORDER}::test_what_comes_back_where_it_was_discarded_is_for_all_streams",),
    ),
    op_recording(
        "streams-of-ops-are-noted",
        text="noteStream(context_, values_, arguments_);",
        tests=(STREAMS,),
    ),
    op_recording("the-stream-of-an-op", text="streams.note(arguments.device());", tests=(STREAMS,)),
    op_recording(
        "uses-of-arguments-are-noted",
        text=(
            "forEachKnown(values, arguments, [&](const at::Tensor& tensor, const auto& value) {\n"
            "      streams.use(*value, tensor.storage());\n    });"
        ),
        tests=(STREAMS,),
    ),
    op_recording(
        "an-op-uses-its-arguments",
        text="streams.use(*value, tensor.storage());",
        tests=(STREAMS,),
    ),
    op_recording(
        "a-writers-stream-is-remembered",
        text="values_.sender().noteStream(write.tensor.device());",
        tests=(STREAMS,),
    ),
    recorder(
        "packed-is-used",
        text="graph.streams.use(value, storage);",
        tests=(STREAMS,),
    ),
    recorder("state-is-copied-after-its-writers", text="sender.joinStreams();", tests=(STREAMS,)),
    sender(
        "gathered-is-used", text="context_.graph->streams.use(value, storage);", tests=(STREAMS,)
    ),
    sender(
        "sent-later-after-its-makers",
        text=("if (!values.empty()) {\n    joinStreams();\n  }"),
        tests=(STREAMS,),
    ),
    sender("a-keepers-stream-is-remembered", text="noteStream(tensor.device());", tests=(STREAMS,)),
    value_map(
        "copied-on-write-is-used",
        text="graph.streams.use(value, value.home.bytes());",
        tests=(f"{STREAMS}::test_state_that_was_copied_when_the_region_ended_goes",),
    ),
    value_map(
        "copied-on-write-is-made",
        text="graph.streams.made(value, value.home.bytes());",
        tests=(f"{ORDER}::test_a_copy_before_a_write_was_made_on_another_stream",),
    ),
)
