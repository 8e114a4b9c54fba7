// The native CPU nodes; each is made by name in cpu_nodes.cc.
#pragma once

#include <memory>

#include "dagserve/node.h"

namespace dagserve {

// Each throws std::invalid_argument or std::runtime_error where its options or files are wrong.
std::unique_ptr<CpuNode> make_tokenize_node(const Config& config);
std::unique_ptr<CpuNode> make_labels_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_rerank_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_tensors_node(const Config& config);

}  // namespace dagserve
