#include "cpu_nodes.h"

namespace dagserve {

std::unique_ptr<CpuNode> make_cpu_node(std::string_view op, const Config& config) {
  if (op == "tokenize") return make_tokenize_node(config);
  if (op == "resolve_labels") return make_labels_node(config);
  if (op == "encode_scores") return make_encode_node(config);
  if (op == "encode_rerank") return make_encode_rerank_node(config);
  if (op == "encode_tensors") return make_encode_tensors_node(config);
  throw std::invalid_argument("no CPU node is called '" + std::string(op) + "'");
}

}  // namespace dagserve
