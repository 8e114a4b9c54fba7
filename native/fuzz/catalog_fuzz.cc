// Any lists of ids and terms through the catalog node, in a workspace that ends where an allocation ends.
//
// Four bits of the first byte say which lists there are; the rest are ids and terms, one a line, which go to them in
// turn. DAGSERVE_TABLES names a catalog's tables. What comes out is compared with the lists of ids, item by item.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cpu_nodes.h"
#include "section_file.h"

namespace {

using namespace dagserve;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

constexpr std::int64_t kRows = 64, kItems = 4096, kDepth = 8, kNodes = kItems * kDepth + 1;
constexpr const char* kOutputs[] = {"first",         "label",    "marks",         "alphabets",
                                    "alphabet_ends", "children", "children_ends", "item_nodes",
                                    "item_offsets",  "items",    "permitted"};

Tensor tensor_of(Dtype dtype, std::int64_t bound) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = 1;
  tensor.shape[0] = tensor.bound[0] = bound;
  return tensor;
}

// The attributes that the tables have, as a JSON list's entries.
std::string attributes_of(const std::string& path) {
  constexpr std::size_t kAttributes = 11;
  std::string entries;
  const SectionFile file(path, "DAGITEMS", 2, "catalog tables");
  for (const char c : file.section(kAttributes)) entries += c == '\n' ? "\",\"" : std::string(1, c);
  return entries.empty() ? entries : '"' + entries + '"';
}

LoadedCpuNode make_node() {
  const char* const tables = std::getenv("DAGSERVE_TABLES");
  const std::string path = tables ? tables : "catalog.bin";
  const std::size_t slash = path.rfind('/');
  NodeConfig config;
  config.op = "catalog";
  config.root = slash == std::string::npos ? "." : path.substr(0, slash);
  config.options = "{\"tables\":\"" + path.substr(slash + 1) + "\",\"max_depth\":8,\"max_children\":4096," +
                   "\"attributes\":[" + attributes_of(path) + "]}";
  for (const char* name : {"allow", "deny", "allow_where", "deny_where"})
    config.inputs.push_back({name, "", tensor_of(Dtype::text, kRows)});
  for (const char* name : kOutputs) config.outputs.push_back({name, "", tensor_of(Dtype::i32, kNodes)});
  for (PortSpec& port : config.outputs)
    if (port.name == "item_nodes") port.bound = tensor_of(Dtype::i32, kItems);
  return LoadedCpuNode(find_cpu_node("catalog", ""), config);
}

struct List {
  std::string payload;
  std::vector<std::int64_t> offsets = {0};

  void add(std::string_view id) {
    if (std::ssize(offsets) > kRows) return;
    payload += id;
    offsets.push_back(std::ssize(payload));
  }
  Tensor tensor() {
    if (offsets.size() == 1) offsets.push_back(0);
    Tensor tensor = tensor_of(Dtype::text, std::ssize(offsets) - 1);
    tensor.data = payload.data();
    tensor.offsets = offsets.data();
    return tensor;
  }
  std::set<std::string_view> ids() const {
    std::set<std::string_view> found;
    for (std::size_t i = 1; i < offsets.size(); ++i)
      found.insert(std::string_view(payload).substr(static_cast<std::size_t>(offsets[i - 1]),
                                                    static_cast<std::size_t>(offsets[i] - offsets[i - 1])));
    return found;
  }
};

void check(const std::vector<Tensor>& outputs, const List* allow, const List* deny, bool terms) {
  const auto at = [&](std::size_t output) { return outputs[output].as<std::int32_t>(); };
  const std::set<std::string_view> allowed = allow ? allow->ids() : std::set<std::string_view>{};
  const std::set<std::string_view> denied = deny ? deny->ids() : std::set<std::string_view>{};
  const auto nodes = static_cast<std::size_t>(outputs[1].shape[0]);
  std::vector<std::uint8_t> marks(nodes);
  for (std::int64_t item = 0; item < outputs[7].shape[0]; ++item) {
    const std::int32_t begin = at(8)[item];
    const std::string_view id(outputs[9].as<char>() + begin, static_cast<std::size_t>(at(8)[item + 1] - begin));
    const bool wanted = (!allow || allowed.contains(id)) && !denied.contains(id);
    const bool permitted = (outputs[10].as<std::uint8_t>()[item / 8] >> item % 8 & 1) != 0;
    if (terms ? permitted && !wanted : permitted != wanted) fail("an item is not as the lists say");
    if (permitted) marks[static_cast<std::size_t>(at(7)[item])] |= 1;
  }
  for (std::int64_t node = outputs[0].shape[0] - 2; node >= 0; --node)
    for (std::int32_t child = at(0)[node]; child < at(0)[node + 1]; ++child)
      if (marks[static_cast<std::size_t>(child)]) marks[static_cast<std::size_t>(node)] |= 2;
  for (std::size_t node = 0; node < nodes; ++node)
    if (marks[node] != (outputs[2].as<std::uint8_t>()[node / 4] >> node % 4 * 2 & 3)) fail("a node is marked wrongly");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const LoadedCpuNode node = make_node();
  const unsigned which = size ? data[0] & 15u : 0u;
  List lists[4];
  std::vector<List*> there;
  for (unsigned i = 0; i < 4; ++i)
    if (which >> i & 1) there.push_back(&lists[i]);
  std::string_view rest(reinterpret_cast<const char*>(data) + (size ? 1 : 0), size ? size - 1 : 0);
  for (std::size_t row = 0; !rest.empty() && !there.empty(); ++row) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    there[row % there.size()]->add(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  std::vector<Tensor> inputs(4, Tensor{.present = false});
  for (unsigned i = 0; i < 4; ++i)
    if (which >> i & 1) inputs[i] = lists[i].tensor();
  std::vector<Tensor> outputs(std::size(kOutputs), tensor_of(Dtype::i32, kNodes));
  const std::unique_ptr<std::byte[]> workspace(new std::byte[node.workspace_bytes()]);
  Status status;
  node.run(inputs, outputs, {workspace.get(), node.workspace_bytes()}, status);
  if (status.code == Code::invalid_request && which >> 2) return 0;
  if (!status.ok()) fail(status.message);
  check(outputs, which & 1 ? &lists[0] : nullptr, which & 2 ? &lists[1] : nullptr, which >> 2);
  return 0;
}
