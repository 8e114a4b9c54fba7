#include "allocations.h"

#include <dlfcn.h>

namespace dagserve {

namespace {

using Counter = std::int64_t (*)();

Counter counter() noexcept {
  static const Counter found = reinterpret_cast<Counter>(dlsym(RTLD_DEFAULT, "dagserve_malloc_count"));
  return found;
}

}  // namespace

bool allocations_counted() noexcept { return counter() != nullptr; }

std::int64_t thread_allocations() noexcept {
  const Counter count = counter();
  return count == nullptr ? 0 : count();
}

}  // namespace dagserve
