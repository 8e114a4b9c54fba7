// Which nodes of a plan wait for which, and how many may run at once.
#pragma once

#include <vector>

#include "dagserve/plan.h"

namespace dagserve {

struct Schedule {
  std::vector<std::vector<int>> consumers;  // nodes that wait for a node, each once
  std::vector<int> waits;                   // how many nodes a node waits for
  int branches = 1;                         // chains that cover all aoti nodes: more than one can run at once
};

// A node waits for the producers of its inputs, and for an earlier node that decides a symbol of its outputs too: what
// is said of sizes that do not agree is then the same in every run.
Schedule make_schedule(const Plan& plan);

}  // namespace dagserve
