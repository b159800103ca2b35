// The observers of a graph, and how the core calls their methods (hooks/observer.h).
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hooks/observer.h"

namespace ebb {

// Observers in the order of adding. While one thread adds, others may read.
template <class Events>
class ObserverList {
 public:
  ObserverList() = default;
  ObserverList(const ObserverList&) = delete;
  ObserverList& operator=(const ObserverList&) = delete;
  ~ObserverList() { clear(); }

  bool empty() const { return first_.load(std::memory_order_acquire) == nullptr; }
  template <class Act>
  void forEach(const Act& act) const {
    for (const Entry* entry = first_.load(std::memory_order_acquire); entry != nullptr;
         entry = entry->next.load(std::memory_order_acquire)) {
      act(*entry->observer);
    }
  }
  void add(Events* observer) {
    std::atomic<Entry*>* end = &first_;
    while (Entry* entry = end->load(std::memory_order_relaxed)) {
      end = &entry->next;
    }
    end->store(new Entry{observer}, std::memory_order_release);
  }
  // No other thread may read.
  void clear() {
    Entry* entry = first_.exchange(nullptr);
    while (entry != nullptr) {
      delete std::exchange(entry, entry->next.load());
    }
  }

 private:
  struct Entry {
    Events* observer;
    std::atomic<Entry*> next{nullptr};
  };
  std::atomic<Entry*> first_{nullptr};
};

// The observers of a graph. A graph nearly always has none. A plug-in adds an observer when the
// graph opens, or later on the region's thread under the graph's lock, even while other threads
// unpack saved tensors of the open region.
class Observers {
 public:
  template <class Derived>
  void add(std::unique_ptr<Derived> observer) {
    addTo(ops_, observer.get());
    addTo(regions_, observer.get());
    addTo(backwards_, observer.get());
    addTo(vetoes_, observer.get());
    all_.push_back(std::move(observer));
  }
  void clear();

  // True if an observer has OpEvents. The core then holds the lock while it records results.
  bool seeOps() const { return !ops_.empty(); }

  // Calls a method of each observer that has the method.
  template <class Events, class... Parameters, class... Arguments>
  void tell(void (Events::*what)(Parameters...), Arguments&&... arguments) const {
    if (!of<Events>().empty()) [[unlikely]] {
      tellAll(of<Events>(), what, arguments...);
    }
  }

  // Like tell(), for methods that return something. whyNotReplayed() returns the first reason.
  RegionNotes enter(const std::string& name, const std::shared_ptr<const Policy>& policy) const;
  bool wantInput(const at::Tensor& tensor) const;
  const char* whyNotReplayed(const NewState& state) const {
    return vetoes_.empty() ? nullptr : askVetoes(state);
  }
  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) const {
    return regions_.empty() ? ExtraPtr() : tellPacked(value, tensor, retention);
  }
  c10::Storage checked(
      const Graph& graph, Value& value, const Geometry& geometry, c10::Storage bytes) const;

 private:
  template <class Events, class Derived>
  static void addTo(ObserverList<Events>& list, Derived* observer) {
    if constexpr (std::is_base_of_v<Events, Derived>) {
      list.add(observer);
    }
  }

  template <class Events>
  const ObserverList<Events>& of() const {
    if constexpr (std::is_same_v<Events, OpEvents>) {
      return ops_;
    } else if constexpr (std::is_same_v<Events, RegionEvents>) {
      return regions_;
    } else {
      return backwards_;
    }
  }

  template <class Events, class... Parameters, class... Arguments>
  [[gnu::cold, gnu::noinline]] static void tellAll(
      const ObserverList<Events>& all, void (Events::*what)(Parameters...),
      Arguments&... arguments) {
    all.forEach([&](Events& observer) { (observer.*what)(arguments...); });
  }
  ExtraPtr tellPacked(Value& value, const at::Tensor& tensor, Retention retention) const;
  const char* askVetoes(const NewState& state) const;

  std::vector<std::unique_ptr<Observer>> all_;
  ObserverList<OpEvents> ops_;
  ObserverList<RegionEvents> regions_;
  ObserverList<BackwardEvents> backwards_;
  ObserverList<ResultVeto> vetoes_;
};

}  // namespace ebb
