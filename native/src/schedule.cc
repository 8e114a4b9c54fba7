#include "schedule.h"

#include <algorithm>
#include <cstddef>

namespace dagserve {
namespace {

using Matrix = std::vector<std::vector<bool>>;

std::vector<bool> symbols_of(const Plan& plan, const std::vector<int>& tensors) {
  std::vector<bool> symbols(plan.symbols.size());
  for (const int tensor : tensors)
    if (tensor >= 0)
      for (const Dim& dim : plan.tensors[tensor].shape)
        if (dim.symbol >= 0) symbols[dim.symbol] = true;
  return symbols;
}

bool feeds(const NodeSpec& producer, const NodeSpec& consumer) {
  return std::ranges::any_of(consumer.inputs, [&](int tensor) {
    return tensor >= 0 && std::ranges::find(producer.outputs, tensor) != producer.outputs.end();
  });
}

// Whether both decide the size of the same symbol.
bool share_a_symbol(const Plan& plan, const NodeSpec& one, const NodeSpec& other) {
  const std::vector<bool> made = symbols_of(plan, one.outputs);
  const std::vector<bool> given = symbols_of(plan, other.inputs);
  const std::vector<bool> also = symbols_of(plan, other.outputs);
  for (std::size_t i = 0; i < made.size(); ++i)
    if (made[i] && also[i] && !given[i]) return true;
  return false;
}

Matrix waits_for(const Plan& plan) {
  const std::size_t count = plan.nodes.size();
  Matrix direct(count, std::vector<bool>(count));
  for (std::size_t node = 0; node < count; ++node)
    for (std::size_t earlier = 0; earlier < node; ++earlier)
      direct[node][earlier] =
          feeds(plan.nodes[earlier], plan.nodes[node]) || share_a_symbol(plan, plan.nodes[earlier], plan.nodes[node]);
  return direct;
}

// `direct` and all that follows from it; nodes are in an order in which they can run.
Matrix closure(Matrix direct) {
  for (std::size_t node = 0; node < direct.size(); ++node)
    for (std::size_t earlier = 0; earlier < node; ++earlier)
      for (std::size_t first = 0; direct[node][earlier] && first < earlier; ++first)
        if (direct[earlier][first]) direct[node][first] = true;
  return direct;
}

int count_chains(const Plan& plan, const Matrix& after) {
  std::vector<std::size_t> ends;
  for (std::size_t node = 0; node < plan.nodes.size(); ++node) {
    if (!plan.nodes[node].aoti) continue;
    const auto found = std::ranges::find_if(ends, [&](std::size_t end) { return after[node][end]; });
    if (found == ends.end()) {
      ends.push_back(node);
    } else {
      *found = node;
    }
  }
  return std::max(1, static_cast<int>(ends.size()));
}

}  // namespace

Schedule make_schedule(const Plan& plan) {
  const Matrix direct = waits_for(plan);
  Schedule schedule;
  schedule.consumers.resize(direct.size());
  for (std::size_t node = 0; node < direct.size(); ++node) {
    schedule.waits.push_back(static_cast<int>(std::ranges::count(direct[node], true)));
    for (std::size_t earlier = 0; earlier < node; ++earlier)
      if (direct[node][earlier]) schedule.consumers[earlier].push_back(static_cast<int>(node));
  }
  schedule.branches = count_chains(plan, closure(direct));
  return schedule;
}

}  // namespace dagserve
