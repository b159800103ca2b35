#include "intercept/op_traits.h"

#include <ATen/core/jit_type.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include "hooks/call_guard.h"
#include "intercept/op_tables.h"
#include "support/leaked.h"
#include "support/thread_owned.h"

namespace ebb {
namespace {

const c10::Type& withoutOptional(const c10::Type& type) {
  const auto* optional = type.castRaw<c10::OptionalType>();
  return optional != nullptr ? withoutOptional(*optional->getElementType()) : type;
}

ArgType typeOf(const c10::TypePtr& declared) {
  const c10::Type& type = withoutOptional(*declared);
  if (type.kind() == c10::TypeKind::TensorType) {
    return ArgType::Tensor;
  }
  const auto* list = type.castRaw<c10::ListType>();
  switch (list == nullptr ? ArgType::Other : typeOf(list->getElementType())) {
    case ArgType::Tensor:
      return ArgType::TensorList;
    case ArgType::TensorList:
      return ArgType::TensorLists;
    default:
      return ArgType::Other;
  }
}

// True if a recipe can hold an argument of this type and pass it again. False for objects with
// state (process groups, streams, packed weights) and for containers that may hide tensors.
bool canBePassedAgain(const c10::TypePtr& declared) {
  const c10::Type& type = withoutOptional(*declared);
  if (typeOf(declared) == ArgType::TensorLists) {
    return false;
  }
  switch (type.kind()) {
    case c10::TypeKind::ClassType:
    case c10::TypeKind::AnyType:
    case c10::TypeKind::StorageType:
    case c10::TypeKind::DictType:
    case c10::TypeKind::PyObjectType:
    case c10::TypeKind::CapsuleType:
    case c10::TypeKind::StreamObjType:
    case c10::TypeKind::FutureType:
      return false;
    case c10::TypeKind::ListType:
      return canBePassedAgain(type.expectRef<c10::ListType>().getElementType());
    default:
      return true;
  }
}

bool holdsGenerator(const c10::TypePtr& type) {
  return withoutOptional(*type).kind() == c10::TypeKind::GeneratorType;
}

OpKind classify(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view)) {
    return OpKind::InplaceView;
  }
  const c10::FunctionSchema& schema = op.schema();
  // record_stream only informs the allocator, though the schema says that it writes.
  if (schema.name() == "aten::record_stream") {
    return OpKind::PassThrough;
  }
  bool returnsTensor = false;
  bool onlyViews = true;
  for (const auto& result : schema.returns()) {
    if (typeOf(result.type()) != ArgType::Other) {
      returnsTensor = true;
      onlyViews &= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    }
  }
  const auto& arguments = schema.arguments();
  const bool hides = std::ranges::any_of(arguments, [&](const auto& argument) {
    return typeOf(argument.type()) != ArgType::Other && hidesWrite(schema.name(), argument.name());
  });
  // Schemas of other libraries may be incomplete, so ebb checks each call for writes to arguments
  // that the schema shows as read. An operator without tensor arguments needs no check.
  const bool trusted =
      isTorchsOwn(schema.name()) || std::ranges::all_of(arguments, [](const auto& argument) {
        return typeOf(argument.type()) == ArgType::Other;
      });
  const bool nothing = trusted && !schema.is_mutable() && !hides && (!returnsTensor || onlyViews);
  return nothing ? OpKind::PassThrough : OpKind::Recorded;
}

void readArguments(OpTraits& traits, const c10::FunctionSchema& schema) {
  ArgumentTraits& all = traits.arguments;
  const bool overwritesFirst = isWholeOverwrite(schema.name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    ArgUse use = ArgUse::Read;
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      // An `out=` argument is written whole, by a convention that torch's own operators keep.
      const bool overwrite =
          (argument.is_out() && !traits.limits.custom) || (overwritesFirst && i == 0);
      use = overwrite ? ArgUse::Overwrite : ArgUse::Write;
    } else if (
        typeOf(argument.type()) != ArgType::Other && hidesWrite(schema.name(), argument.name())) {
      use = receivesInto(schema.name(), argument.name()) ? ArgUse::Overwrite : ArgUse::Write;
    }
    all.counted.push_back(isCounted(traits.op, argument));
    all.uses.push_back(use);
    all.otherwise.push_back(use);
    all.types.push_back(typeOf(argument.type()));
    if (all.types.back() != ArgType::Tensor) {
      all.others.push_back(static_cast<uint16_t>(i));
    }
    traits.limits.neverReplayed |= !canBePassedAgain(argument.type());
    if (holdsGenerator(argument.type())) {
      traits.random.generatorArgument = static_cast<int16_t>(i);
    }
    if (argument.name() == "dropout_p" && !traits.limits.custom) {
      traits.random.dropoutArgument = static_cast<int16_t>(i);
    }
  }
}

void fill(OpTraits& traits) {
  const auto& schema = traits.op.schema();
  traits.name = qualifiedName(traits.op.operator_name());
  traits.limits.custom = !isTorchsOwn(schema.name());
  readArguments(traits, schema);
  applyTables(traits);
  if (traits.limits.custom) {
    traits.guard =
        guardOf(traits.limits.asynchronous ? Guarded::Collectives : Guarded::CustomOperators);
  }
  traits.arguments.writes = std::ranges::any_of(traits.arguments.uses, [](ArgUse use) {
    return use != ArgUse::Read && use != ArgUse::Unread;
  });
  traits.random.draws = traits.op.hasTag(at::Tag::nondeterministic_seeded);
  for (const auto& result : schema.returns()) {
    traits.results.push_back(typeOf(result.type()));
  }
  traits.kind = classify(traits.op);
  if (traits.arguments.readsOnlyShapes) {
    traits.arguments.uses[0] = traits.arguments.otherwise[0] = ArgUse::Unread;
  }
}

struct Registry {
  std::mutex mutex;                                       // guards all members
  std::deque<OpTraits> all;                               // never shrinks: references stay valid
  ska::flat_hash_map<size_t, const OpTraits*> byAddress;  // std::hash of a handle is an address
  std::atomic<uint64_t> epoch{1};                         // grows when an address is forgotten
};

Registry& registry() { return leaked<Registry>(); }

// Each thread has a copy of the table, so that no op takes a lock.
struct Known {
  ska::flat_hash_map<size_t, const OpTraits*> byAddress;
  uint64_t epoch = 0;  // Registry::epoch when `byAddress` was last cleared
};

// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local Known* tlsKnown = nullptr;

const OpTraits* findOrCreate(const c10::OperatorHandle& op, size_t address) {
  Registry& shared = registry();
  std::lock_guard<std::mutex> lock(shared.mutex);
  const OpTraits*& slot = shared.byAddress[address];
  if (slot == nullptr) {
    OpTraits& traits = shared.all.emplace_back(op);
    traits.index = static_cast<uint32_t>(shared.all.size() - 1);
    fill(traits);
    slot = &traits;
  }
  return slot;
}

}  // namespace

std::string qualifiedName(const c10::OperatorName& name) {
  return name.name + "." + (name.overload_name.empty() ? "default" : name.overload_name);
}

const OpTraits& opTraits(const c10::OperatorHandle& op) {
  Known& known = threadOwned(tlsKnown);
  const uint64_t epoch = registry().epoch.load(std::memory_order_acquire);
  if (known.epoch != epoch) {
    known.byAddress.clear();
    known.epoch = epoch;
  }
  const size_t address = std::hash<c10::OperatorHandle>{}(op);
  const OpTraits*& slot = known.byAddress[address];
  if (slot == nullptr || slot->op != op) {
    slot = findOrCreate(op, address);
  }
  return *slot;
}

bool isTorchsOwn(std::string_view name) {
  return name.starts_with("aten::") || name.starts_with("prims::");
}

bool passesThrough(const c10::OperatorHandle& op) { return classify(op) == OpKind::PassThrough; }

void forgetOpTraits(const c10::OperatorHandle& op) {
  Registry& shared = registry();
  std::lock_guard<std::mutex> lock(shared.mutex);
  const auto found = shared.byAddress.find(std::hash<c10::OperatorHandle>{}(op));
  if (found != shared.byAddress.end()) {
    found->second->state.registered.store(false, std::memory_order_release);
    shared.byAddress.erase(found);
    shared.epoch.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace ebb
