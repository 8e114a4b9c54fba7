// Counts allocations where the process brings a counter: a test preloads a library with `dagserve_malloc_count`, which
// returns how often the calling thread has allocated. Without one, nothing is counted.
#pragma once

#include <cstdint>

namespace dagserve {

std::int64_t thread_allocations() noexcept;
bool allocations_counted() noexcept;

}  // namespace dagserve
