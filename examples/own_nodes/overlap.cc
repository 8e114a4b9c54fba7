// A CPU node in C++: the share of the query's words that stand in each item.
//
// Words are runs of bytes other than ASCII spaces; case is folded for ASCII letters. No word is copied.

#include <dagserve/cpu_node.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string_view>

namespace {

char fold(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; }

bool same(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (fold(a[i]) != fold(b[i])) return false;
  return true;
}

// The next word of a text, taken from its front; empty at the end.
std::string_view next_word(std::string_view& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return {};
  text.remove_prefix(begin);
  const std::string_view word = text.substr(0, text.find_first_of(" \t\r\n"));
  text.remove_prefix(word.size());
  return word;
}

bool contains(std::string_view text, std::string_view wanted) {
  for (std::string_view word = next_word(text); !word.empty(); word = next_word(text))
    if (same(word, wanted)) return true;
  return false;
}

float overlap(std::string_view query, std::string_view item) {
  int words = 0;
  int found = 0;
  for (std::string_view word = next_word(query); !word.empty(); word = next_word(query)) {
    ++words;
    found += contains(item, word);
  }
  return words == 0 ? 0.0f : static_cast<float>(found) / static_cast<float>(words);
}

std::string_view text(const dagserve_tensor& tensor, std::int64_t row) {
  return {static_cast<const char*>(tensor.data) + tensor.offsets[row],
          static_cast<std::size_t>(tensor.offsets[row + 1] - tensor.offsets[row])};
}

void* create(const dagserve_config* config, dagserve_status* status) {
  static char node;  // there is nothing to keep
  if (config->input_count == 2 && config->output_count == 1) return &node;
  status->code = DAGSERVE_INTERNAL;
  std::snprintf(status->message, sizeof(status->message), "Overlap has the inputs query and items and one output");
  return nullptr;
}

void run(const void*, const dagserve_tensor* inputs, std::size_t, dagserve_tensor* outputs, std::size_t, void*,
         std::size_t, dagserve_status* status) {
  const dagserve_tensor& query = inputs[0];
  const dagserve_tensor& items = inputs[1];
  if (query.offsets[1] == 0) {
    status->code = DAGSERVE_INVALID_REQUEST;
    std::snprintf(status->message, sizeof(status->message), "[Overlap] query is empty; send some words");
    return;
  }
  outputs[0].shape[0] = items.shape[0];
  for (std::int64_t row = 0; row < items.shape[0]; ++row)
    static_cast<float*>(outputs[0].data)[row] = overlap(text(query, 0), text(items, row));
}

const dagserve_cpu_node kNodes[] = {
    {"Overlap", create, [](void*) {}, [](const void*) -> std::size_t { return 0; }, run},
};
const dagserve_library kLibrary = {DAGSERVE_NODE_ABI, 1, kNodes};

}  // namespace

const dagserve_library* dagserve_nodes() { return &kLibrary; }
