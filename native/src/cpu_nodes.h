// CPU nodes behind their C interface: dagserve's own, and those of shared libraries.
#pragma once

#include <memory>
#include <string>

#include "dagserve/cpu_node.h"
#include "dagserve/node.h"

namespace dagserve {

// Each throws std::invalid_argument or std::runtime_error where its options or files are wrong.
std::unique_ptr<CpuNode> make_tokenize_node(const Config& config);
std::unique_ptr<CpuNode> make_labels_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_embeddings_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_rerank_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_tensors_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_sequences_node(const Config& config);
std::unique_ptr<CpuNode> make_encode_classes_node(const Config& config);
std::unique_ptr<CpuNode> make_catalog_node(const Config& config);
std::unique_ptr<CpuNode> make_share_prefix_node(const Config& config);

// The node of that name: dagserve's own where `library` is empty, otherwise of the shared library at that path, which
// stays loaded. Throws std::invalid_argument where there is none, std::runtime_error where the library is of no use.
const dagserve_cpu_node& find_cpu_node(const std::string& op, const std::string& library);

// A node that has been created. Throws what its `create` reported, as std::invalid_argument.
class LoadedCpuNode {
 public:
  LoadedCpuNode(const dagserve_cpu_node& type, const NodeConfig& config);
  ~LoadedCpuNode() { type_.destroy(node_); }
  LoadedCpuNode(const LoadedCpuNode&) = delete;
  LoadedCpuNode& operator=(const LoadedCpuNode&) = delete;

  std::size_t workspace_bytes() const { return type_.workspace_bytes(node_); }
  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
           Status& status) const noexcept;

 private:
  const dagserve_cpu_node& type_;
  void* node_;
};

}  // namespace dagserve
