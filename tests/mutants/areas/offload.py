"""OFFLOAD: copies, the memory they use, and the streams of a graph."""

from __future__ import annotations

from collections.abc import Iterator

from mutant import Mutant

COPIES = "src/offload/copies.cpp"
ENGINE = "src/offload/offload.cpp"
SPILL = "src/offload/spill.cpp"
STREAMS = "src/graph/streams.cpp"

TESTS = (
    "tests/accelerator/test_streams.py",
    "tests/accelerator/test_offload_captures.py",
    "tests/accelerator/test_offload_failures.py",
    "tests/accelerator/test_offload_steady.py",
    "tests/accelerator/test_offload_waits.py::test_all_is_in_order",
    "tests/offload",
)

EACH = {
    "src/offload/*.cpp": r"\bvia_?\.(wait|finish|used)\(|\bisDone\(\*(?!stash)|\basDiskEvent\(",
    "src/transfer/*.cpp": r"\bfinish\(\*|\.wait\(\)",
    "src/[rs][eae]*/*.cpp": r"(?<!& )\bstreams\.(use|made|share|note)\(",
}


# (name, text, instead, within)
PLACES: dict[str, list[tuple[str, ...]]] = {
    COPIES: [
        ("a-capture-is-over", "endCapture();"),
        ("a-capture-has-copied-nothing", "copied_ = false;"),
        ("outside-is-put-aside", "outside_ = std::exchange(now_, {});"),
        ("host-memory-of-a-capture-stays", "context_.host.captureIsOver();"),
        (
            "leaving-of-a-capture-is-its-graphs",
            "context_.host.giveToGraph(std::move(leaving.onHost));",
        ),
        ("held-of-a-capture-is-its-graphs", "context_.host.giveToGraph(std::move(held.onHost));"),
        ("outside-comes-back", "now_ = std::exchange(outside_, {});"),
        (
            "host-memory-of-a-capture-is-no-pools",
            "capture == 0",
            "true",
            "if (capture == 0) {\n    context_.host.give(",
        ),
        (
            "host-memory-in-a-capture-again",
            "capture == capture_",
            "false",
            "} else if (capture == capture_) {",
        ),
        (
            "host-memory-of-another-capture",
            "capture == capture_",
            "true",
            "} else if (capture == capture_) {",
        ),
        ("a-stash-is-of-a-capture", "stash.capture = capture_;"),
        ("packed-on-uses-what-leaves", "via_.used(stash.onDevice, stash.packedOn);"),
        (
            "in-flight-limit",
            "while (now_.leavingBytes > context_.settings.inFlightBytes) {\n    waitForFirst();\n  }",
        ),
        ("devices-that-were-left", "devices_.push_back(stash.device);"),
        ("out-waits-packed-on", "via_.wait(out, via_.record(stash.packedOn));"),
        ("a-capture-has-copied", "copied_ = true;"),
        ("packed-on-waits-left", "via_.wait(first.packedOn, first.left);"),
        ("host-waits-left", "via_.finish(*first.left);"),
        ("fetched-while-leaving", "stash.state != State::Leaving", "false"),
        ("lost-while-leaving", "stash.lost = !stash.hasWhatWasSent();"),
        ("failed-to-leave", "!first.left->error().empty()", "false"),
        ("kept-before-a-write", "takeOut(now_.kept, stash);\n    startLeaving(stash);"),
        ("kept-before-a-write-is-in-no-list", "takeOut(now_.kept, stash);"),
        (
            "leaving-before-a-write",
            "finishLeaving(stash);",
            "",
            "if (stash.state == State::Leaving) {\n    finishLeaving(stash);",
        ),
        ("writer-waits-left", "via_.wait(via_.computeStream(stash.device), stash.left);"),
        ("failed-to-leave-before-a-write", "!stash.left->error().empty()", "false"),
        ("failed-to-leave-has-a-copy", "moveToCopy(stash);"),
        (
            "held-until-left-for-a-writer",
            "now_.held.push_back({stash.left, stash.packedOn, std::move(stash.onDevice), {}, stash.device});",
            "context_.drop(stash.onDevice);",
        ),
        ("in-waits-compute", "via_.wait(in, via_.record(via_.computeStream(stash.device)));"),
        ("in-waits-left", "via_.wait(in, stash.left);"),
        ("returning-is-not-away", "StashesInOrder::takeOut(stash);"),
        ("moves-what-came-ahead-elsewhere", "stash.ahead && stash.packedOn != compute", "false"),
        ("compute-waits-returned", "via_.wait(compute, stash.returned);"),
        ("failed-to-come-back", "stash.checkCameBack(*stash.returned);"),
        (
            "known-done-when-taken",
            "if (!takeOut(now_.returning, stash)) {\n    return;\n  }",
            "takeOut(now_.returning, stash);",
        ),
        ("out-waits-returned", "via_.wait(via_.outStream(stash.device), stash.returned);"),
        (
            "held-until-returned",
            "now_.held.push_back({stash.returned, compute, {}, std::move(stash.onHost), stash.device});",
            "give(stash.onHost, stash.device, capture_);",
        ),
        ("in-waits-compute-to-move", "via_.wait(in, via_.record(compute));"),
        (
            "held-until-moved",
            "now_.held.push_back(\n      {moved, stash.packedOn, std::exchange(stash.onDevice, std::move(here)), {}, stash.device});",
            "stash.onDevice = std::move(here);",
        ),
        ("compute-waits-moved", "via_.wait(compute, moved);"),
        ("second-waits-taken-on", "via_.wait(compute, via_.record(*stash.takenOn));"),
        ("second-uses-what-was-fetched", "via_.used(stash.onDevice, compute);"),
        (
            "held-until-returned-for-nobody",
            "place->held.push_back(\n        {stash.returned,\n         stash.packedOn,\n         std::move(stash.onDevice),\n         std::move(stash.onHost),\n         stash.device});",
        ),
        (
            "nobody-asks-in-static-mode",
            "!context_.settings.isStatic && capture_ == 0 && via_.isDone(event)",
            "via_.isDone(event)",
        ),
        ("held-until-left", "!isKnownDone(*stash.left)", "false"),
        (
            "fetched-is-not-kept",
            "takeOut(place->kept, stash);",
            "",
            "--place->unfetched;\n    takeOut(place->kept, stash);",
        ),
        (
            "forgotten-is-not-kept",
            "takeOut(place->kept, stash);",
            "",
            "stash.state != State::Back;\n    takeOut(place->kept, stash);",
        ),
        ("forgotten-while-leaving", "stash.onHost && leaving.stash == &stash", "false"),
        (
            "forgotten-while-returning",
            "giveDeviceMemory(stash);",
            "",
            "if (stash.state == State::Returning) {\n      giveDeviceMemory(stash);",
        ),
        ("asks-whether-it-left", "via_.isDone(*now_.leaving.front().left)", "true"),
        ("asks-whether-it-returned", "via_.isDone(*now_.returning.front()->returned)", "true"),
        ("asks-whether-it-is-held", "via_.isDone(*now_.held.front().until)", "true"),
        (
            "static-waits-for-unused",
            "while (!now_.leaving.empty() && now_.leaving.front().stash == nullptr) {\n    waitForFirst();\n  }",
        ),
        ("static-joins-when-none-is-away", "joinAll();"),
        ("joins-what-leaves", "via_.wait(leaving->packedOn, leaving->left);"),
        (
            "joins-what-leaves-first",
            "joinLeaving();",
            "",
            "void Copies::joinAll() {\n  joinLeaving();",
        ),
        ("joins-what-is-held", "via_.wait(first.stream, first.until);"),
        ("out-waits-held", "via_.wait(via_.outStream(first.device), first.until);"),
        ("makes-room-in-static-mode", "joinLeaving();", "", "isStatic) {\n    joinLeaving();"),
        ("host-waits-to-make-room", "via_.finish(*now_.leaving.back().left);"),
        ("host-waits-for-leaving", "via_.finish(*leaving.left);"),
        ("host-waits-for-returning", "via_.finish(*stash->returned);"),
        ("host-waits-for-held", "via_.finish(*held.until);"),
        ("host-waits-for-out-streams", "via_.finish(*via_.record(via_.outStream(device)));"),
        ("host-waits-for-host-memory", "via_.finish(*next);"),
    ],
    ENGINE: [
        (
            "beside-a-capture-it-stays",
            "copies_.capture() == 0 || via_.isCapturing(via_.computeStream(device))",
            "true",
        ),
        ("ahead-again-after-a-forward", "triesAhead_ = true;"),
        ("handed-over-to-another-stream", "copies_.handOver(stash, compute);"),
        (
            "of-a-capture-is-not-fetched-outside",
            "checkPlace(stash);",
            "",
            "if (stash.capture != 0) {\n    checkPlace(stash);",
        ),
        (
            "static-joins-after-the-last-fetch",
            "copies_.reapUnused();",
            "",
            "copies_.unfetchedHere() == 0) {\n    copies_.reapUnused();",
        ),
        ("living-while-on-disk", "spill_.settle(stash);"),
        ("living-while-returning", "copies_.giveDeviceMemory(stash);"),
        (
            "of-outside-is-not-fetched-in-a-capture",
            "checkPlace(stash);",
            "",
            "if (!onDevice) {\n    checkPlace(stash);",
        ),
        ("lost-is-told", "onDevice ? stash.hasWhatWasSent() : !stash.lost", "true"),
        (
            "taken-is-not-away",
            "StashesInOrder::takeOut(stash);",
            "",
            "notAheadAnyMore(stash);\n  StashesInOrder::takeOut(stash);\n  copies_.fetched(stash);",
        ),
        ("remembers-for-whom-it-was-taken", "stash.takenOn = compute;"),
        (
            "a-write-notices-a-capture",
            "copies_.noticeCapture(stash.device);",
            "",
            "copies_.noticeCapture(stash.device);\n    checkPlace",
        ),
        (
            "a-write-in-a-capture-is-told",
            "checkPlace(stash);",
            "",
            "checkPlace(stash);\n    copies_.beforeWrite",
        ),
        ("ahead-of-the-living-and-the-here", "!alive || !copies_.isHere(*next)", "!alive"),
        (
            "ahead-on-the-stream-it-was-packed-on",
            "next->packedOn == compute && !next->lost",
            "!next->lost",
        ),
        (
            "lost-is-not-fetched-ahead",
            "next->packedOn == compute && !next->lost",
            "next->packedOn == compute",
        ),
        ("not-ahead-without-memory", "triesAhead_ = false;"),
        (
            "forgotten-is-in-no-list",
            "StashesInOrder::takeOut(stash);",
            "",
            "StashesInOrder::takeOut(stash);\n  context_.drop(stash.onDisk);",
        ),
        (
            "a-death-notices-a-capture",
            "copies_.noticeCapture(stash.device);",
            "",
            "copies_.noticeCapture(stash.device);\n  copies_.forget",
        ),
        (
            "static-joins-after-the-last-death",
            "copies_.reapUnused();",
            "",
            "if (context_.settings.isStatic) {\n      copies_.reapUnused();",
        ),
        (
            "nothing-is-asked-in-a-capture-by-a-death",
            "copies_.capture() == 0",
            "true",
            "} else if (copies_.capture() == 0) {",
        ),
        ("each-call-notices-a-capture", "copies_.noticeCapture(device);"),
        (
            "captures-are-static-only",
            "copies_.capture() == 0 || context_.settings.isStatic",
            "true",
        ),
        (
            "a-child-has-no-room-of-its-parents",
            "context_.host.trim();",
            "",
            "context_.host.trim();  // free room in the parent",
        ),
        (
            "a-change-of-mode-waits",
            "!captures && std::exchange(wasStatic_, isStatic) != isStatic",
            "false",
        ),
        (
            "a-change-of-mode-outside-of-captures",
            "!captures && std::exchange(wasStatic_, isStatic) != isStatic",
            "std::exchange(wasStatic_, isStatic) != isStatic",
        ),
        (
            "static-forgets-what-is-unused",
            "copies_.reapUnused();",
            "",
            "copies_.reapUnused();  // see",
        ),
        ("nothing-is-asked-in-a-capture", "!captures", "true", "} else if (!captures) {"),
        (
            "a-drain-waits",
            "copies_.finishAll();",
            "",
            "const Lock lock(mutex());\n  copies_.finishAll();",
        ),
        ("a-drain-waits-for-the-disk", "spill_.finishAll();"),
        ("statistics-notice-a-capture", "copies_.noticeCapture();"),
    ],
    SPILL: [
        (
            "memory-of-a-capture-is-not-allocated",
            "if (copies_.capture() != 0) {\n    return hostMemoryOfCapture(nbytes, device);\n  }",
        ),
        ("host-waits-for-the-disk", "asDiskEvent(*first.written).wait();"),
        ("host-waits-for-a-copy", "!copies_.finishOne()", "false"),
        ("dying-and-captured-is-not-written", "!alive || first->capture != 0", "!alive"),
        ("written-after-it-left", "context_.via.isDone(*first->left)", "true"),
        (
            "written-is-not-away",
            "StashesInOrder::takeOut(stash);",
            "",
            "StashesInOrder::takeOut(stash);\n  spilling_",
        ),
        (
            "read-is-not-on-disk",
            "StashesInOrder::takeOut(stash);",
            "",
            "StashesInOrder::takeOut(stash);\n  reading_",
        ),
        ("needed-while-written", "asDiskEvent(*stash.written).wait();"),
        ("needed-while-written-is-not-spilled", "takeOut(spilling_, stash);"),
        ("host-waits-for-a-read", "asDiskEvent(*stash.read).wait();"),
        ("failed-to-be-read", "stash.checkCameBack(*stash.read);"),
        ("failed-to-be-read-stays-on-disk", "stash.read->error().empty()", "true"),
        ("failed-to-be-written-stays", "!error.empty()", "false"),
        (
            "asks-whether-it-was-written",
            "asDiskEvent(*spilling_.front()->written).isDone()",
            "true",
        ),
        ("asks-whether-it-was-read", "asDiskEvent(*reading_.front()->read).isDone()", "true"),
        ("a-drain-waits-for-writes", "asDiskEvent(*stash->written).wait();"),
        ("a-drain-waits-for-reads", "asDiskEvent(*stash->read).wait();"),
    ],
    "src/transfer/disk_transfer.cpp": [
        ("compute-waits-for-the-disk", "finish(*event);"),
        ("a-job-waits-for-another", "before_[stream.id()].push_back(event);"),
        (
            "a-job-that-is-done-and-failed",
            "!isDone(*event) || !event->error().empty()",
            "!isDone(*event)",
        ),
        ("room-of-another-file-is-not-used", "Disk::get().isCurrent(host)", "true"),
        ("host-waits-for-a-job", "asDiskEvent(event).wait();"),
    ],
    "src/transfer/disk.cpp": [
        ("a-job-waits", "earlier.wait();"),
        (
            "a-job-after-one-that-failed",
            "if (!earlier.error().empty()) {\n        return earlier.error();\n      }",
        ),
        (
            "a-job-of-the-parents-fails",
            "if (!job.refused.empty()) {\n      return job.refused;\n    }",
        ),
        ("a-file-lives-until-its-jobs-are-done", "job.file.reset();"),
        (
            "a-child-has-queues-of-its-own",
            "writes_ = std::make_shared<Queue>();\n  reads_ = std::make_shared<Queue>();",
        ),
        (
            "room-of-another-file",
            "roomOf(room).process == ::getpid() && roomOf(room).file == file_",
            "roomOf(room).process == ::getpid()",
        ),
        (
            "room-of-another-process",
            "roomOf(room).process == ::getpid() && roomOf(room).file == file_",
            "roomOf(room).file == file_",
        ),
        ("room-is-given-back-where-it-was-taken", "room->process == ::getpid()", "true"),
        ("an-event-of-the-parents-is-over", "if (!isOfThisProcess()) {\n    return true;\n  }"),
        (
            "an-event-of-the-parents-is-not-waited-for",
            "isOfThisProcess()",
            "true",
            "if (isOfThisProcess()) {",
        ),
        ("an-event-of-the-parents-failed", "isOfThisProcess() || done_", "true"),
    ],
    "src/transfer/host_pool.cpp": [
        ("only-what-is-reusable-is-given-back", "!via_.isReusable(memory)", "false"),
    ],
    STREAMS: [
        ("asker-waits-for-unnumbered-makers", "waitFor(all_[i], all_[asker]);"),
        ("asker-waits-for-maker", "waitFor(all_[maker - 1], all_[asker]);"),
        ("allocator-is-told-of-users", "tellOf(all_[current], storage);"),
        ("all-wait-for-what-is-shared", "waitFor(current, other);"),
        ("allocator-is-told-of-all", "tellOf(other, storage);"),
        (
            "made-is-remembered",
            "value.madeOn = static_cast<uint8_t>(std::min<size_t>(current + 1, UINT8_MAX));",
        ),
        ("made-is-not-ordered-yet", "value.orderedOn = 0;"),
        (
            "several-streams-on-a-device",
            "several_ |= std::any_of(all_.begin(), all_.end(), [&](c10::Stream other) {\n      return other.device() == stream.device();\n    });",
        ),
        (
            "only-streams-of-the-device-share",
            "other != current && other.device() == current.device()",
            "other != current",
        ),
        (
            "the-last-streams-have-no-bit",
            "place < kBits - 1 ? static_cast<uint8_t>(1U << place) : 0",
            "static_cast<uint8_t>(1U << (place % kBits))",
        ),
    ],
    "src/replay/replay.cpp": [
        ("brought-back-is-made", "graph.streams.made(value, value.bytes);"),
    ],
    "src/replay/rerun.cpp": [
        ("a-replay-uses-its-inputs", "graph_.streams.use(*input.value, storage);"),
        ("a-replay-uses-what-it-copies", "graph_.streams.use(value, storage);"),
        ("a-replay-makes", "graph_.streams.made(*value, value->bytes);"),
        (
            "a-buffer-is-taken-on-one-stream",
            "value.isPrivate && !graph_.streams.areSeveral()",
            "value.isPrivate",
        ),
    ],
    "src/replay/escapes.cpp": [
        ("a-filled-escape-is-used", "graph.streams.use(value, bytes);"),
        ("a-filled-escape-is-shared", "graph.streams.share(bytes);"),
    ],
    "src/saved/saved_tensor.cpp": [
        ("unpacked-again-is-used", "graph_->streams.use(*value_, unpacked_.storage());"),
        ("a-placeholder-is-shared-by-all", "graph_->streams.share(unpacked.storage());"),
        ("redefined-is-used", "graph_->streams.use(*value_, value_->redefined);"),
        ("unpacked-is-used", "graph_->streams.use(*value_, storage);"),
        ("a-copy-for-recipes-is-made", "graph_->streams.made(*value_, value_->bytes);"),
    ],
    "src/saved/placeholder.cpp": [
        ("a-placeholder-is-shared", "saved_->shareWithAllStreams(tensor);"),
    ],
    "src/record/op_recording.cpp": [
        (
            "streams-of-ops-are-noted",
            "noteStream();",
            "",
            "if (arguments_.areOffCpu()) {\n    noteStream();",
        ),
        ("the-stream-of-an-op", "streams.note(argument.flags.device);"),
        (
            "uses-of-arguments-are-noted",
            "noteUses();",
            "",
            "if (streams.areSeveral()) {\n    noteUses();",
        ),
        (
            "an-op-uses-its-arguments",
            "context_.graph->streams.use(**known, argument.tensor->storage());",
        ),
        ("a-writers-stream-is-remembered", "sender_.noteStream(write.tensor.device());"),
    ],
    "src/record/recorder.cpp": [
        ("packed-is-used", "context_.graph->streams.use(*value, tensor.storage());"),
        ("state-is-copied-after-its-writers", "sender_.joinStreams();"),
    ],
    "src/record/sender.cpp": [
        ("gathered-is-used", "context_.graph->streams.use(value, storage);"),
        ("sent-later-after-its-makers", "if (!values.empty()) {\n    joinStreams();\n  }"),
        ("a-keepers-stream-is-remembered", "noteStream(tensor.device());"),
    ],
    "src/record/value_map.cpp": [
        ("copied-on-write-is-used", "streams.use(value, value.bytes);"),
        ("copied-on-write-is-made", "streams.made(value, value.bytes);"),
    ],
}


def places() -> Iterator[Mutant]:
    for file, rows in PLACES.items():
        for name, text, *more in rows:
            yield Mutant(name, file, text, ("tests/offload/test_offload_order.py",), *more)


MUTANTS = tuple(places())
