#include "cpu_nodes.h"

#include <dlfcn.h>

#include <algorithm>
#include <exception>

namespace dagserve {
namespace {

// The C structs are the C++ ones by another name.
static_assert(sizeof(Tensor) == sizeof(dagserve_tensor) && sizeof(Status) == sizeof(dagserve_status));
static_assert(offsetof(Tensor, dtype) == offsetof(dagserve_tensor, dtype));
static_assert(offsetof(Tensor, present) == offsetof(dagserve_tensor, present));
static_assert(offsetof(Tensor, rank) == offsetof(dagserve_tensor, rank));
static_assert(offsetof(Tensor, shape) == offsetof(dagserve_tensor, shape));
static_assert(offsetof(Tensor, bound) == offsetof(dagserve_tensor, bound));
static_assert(offsetof(Tensor, capacity) == offsetof(dagserve_tensor, capacity));
static_assert(offsetof(Status, node) == offsetof(dagserve_status, node));
static_assert(offsetof(Status, message) == offsetof(dagserve_status, message));
static_assert(kMaxRank == DAGSERVE_MAX_RANK && static_cast<int>(Dtype::text) == DAGSERVE_TEXT);
static_assert(static_cast<int>(Code::invalid_request) == DAGSERVE_INVALID_REQUEST);
static_assert(static_cast<int>(Code::internal) == DAGSERVE_INTERNAL);

Status& status_of(dagserve_status* status) { return *reinterpret_cast<Status*>(status); }

// A C++ node behind the C interface.
template <std::unique_ptr<CpuNode> (*kMake)(const Config&)>
constexpr dagserve_cpu_node builtin(const char* op) {
  return {
      op,
      [](const dagserve_config* config, dagserve_status* status) -> void* {
        try {
          return kMake(Config(*config)).release();
        } catch (const std::exception& error) {
          status_of(status).fail(Code::internal, "%s", error.what());
          return nullptr;
        }
      },
      [](void* node) { delete static_cast<CpuNode*>(node); },
      [](const void* node) { return static_cast<const CpuNode*>(node)->workspace_bytes(); },
      [](const void* node, const dagserve_tensor* inputs, std::size_t input_count, dagserve_tensor* outputs,
         std::size_t output_count, void* workspace, std::size_t bytes, dagserve_status* status) {
        static_cast<const CpuNode*>(node)->run({reinterpret_cast<const Tensor*>(inputs), input_count},
                                               {reinterpret_cast<Tensor*>(outputs), output_count},
                                               {static_cast<std::byte*>(workspace), bytes}, status_of(status));
      },
  };
}

constexpr dagserve_cpu_node kNodes[] = {
    builtin<make_tokenize_node>("tokenize"),
    builtin<make_labels_node>("resolve_labels"),
    builtin<make_encode_node>("encode_scores"),
    builtin<make_encode_embeddings_node>("encode_embeddings"),
    builtin<make_encode_rerank_node>("encode_rerank"),
    builtin<make_encode_tensors_node>("encode_tensors"),
    builtin<make_encode_sequences_node>("encode_sequences"),
    builtin<make_encode_classes_node>("encode_classes"),
    builtin<make_catalog_node>("catalog"),
    builtin<make_share_prefix_node>("share_prefix"),
};
constexpr dagserve_library kLibrary = {DAGSERVE_NODE_ABI, std::size(kNodes), kNodes};

const dagserve_library& open_library(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error("cannot load " + path + ": " + dlerror());
  const auto nodes = reinterpret_cast<decltype(&dagserve_nodes)>(dlsym(handle, "dagserve_nodes"));
  const dagserve_library* const library = nodes == nullptr ? nullptr : nodes();
  if (library == nullptr)
    throw std::runtime_error(path + " exports no dagserve_nodes; build it against dagserve/cpu_node.h");
  if (library->abi != DAGSERVE_NODE_ABI)
    throw std::runtime_error(path + " is built for node interface " + std::to_string(library->abi) + ", this is " +
                             std::to_string(DAGSERVE_NODE_ABI) + "; build it again with this dagserve's header");
  return *library;
}

}  // namespace

const dagserve_cpu_node& find_cpu_node(const std::string& op, const std::string& path) {
  const dagserve_library& library = path.empty() ? kLibrary : open_library(path);
  const std::span<const dagserve_cpu_node> nodes(library.nodes, library.node_count);
  const auto found = std::ranges::find(nodes, std::string_view(op), &dagserve_cpu_node::op);
  if (found == nodes.end())
    throw std::invalid_argument("no CPU node is called '" + op + "'" + (path.empty() ? "" : " in " + path));
  return *found;
}

LoadedCpuNode::LoadedCpuNode(const dagserve_cpu_node& type, const NodeConfig& config) : type_(type) {
  Status status;
  node_ = config.with(
      [&](const dagserve_config& c) { return type.create(&c, reinterpret_cast<dagserve_status*>(&status)); });
  if (node_ != nullptr && status.ok()) return;
  if (node_ != nullptr) type.destroy(node_);
  throw std::invalid_argument(status.message[0] ? status.message : "the node could not be created and did not say why");
}

void LoadedCpuNode::run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
                        Status& status) const noexcept {
  type_.run(node_, reinterpret_cast<const dagserve_tensor*>(inputs.data()), inputs.size(),
            reinterpret_cast<dagserve_tensor*>(outputs.data()), outputs.size(), workspace.data(), workspace.size(),
            reinterpret_cast<dagserve_status*>(&status));
}

}  // namespace dagserve
