// Builds, runs and times a TensorRT 8.5 plan of the vision tower. Its Python module needs Python 3.10; this needs none.
//   trtprobe build ONNX PLAN MODE [--tiles MIN,USUAL,MAX] [--tactics MASK] [--cache FILE] [--log FILE] [--threads N]
//                  [--heuristic] [--faster]
//       MODE free: float16 wherever TensorRT likes; typed: each layer in the type that the graph gives it; tf32
//       --tiles: of a graph with any number of tiles; --heuristic: fewer tactics timed; --faster: 8.5's preview of
//       dynamic shapes in the compiler. SIGTERM ends a build and keeps its timing cache.
//   trtprobe run PLAN TILES.u8 COUNT ROWS        uint8 [COUNT, side, side, 3] -> rows; a plan for one size runs in turns
//   trtprobe time PLAN TILES.u8 BATCHES ITERATIONS
//   trtprobe layers PLAN OUT.json
#include <NvInfer.h>
#include <NvInferPlugin.h>
#include <NvOnnxParser.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

using namespace nvinfer1;
using Clock = std::chrono::steady_clock;

#define CUDA(call) \
  do { \
    cudaError_t error = (call); \
    if (error != cudaSuccess) fail(3, std::string(#call) + ": " + cudaGetErrorString(error)); \
  } while (0)

[[noreturn]] static void fail(int code, std::string const& what) {
  fprintf(stderr, "trtprobe: %s\n", what.c_str());
  exit(code);
}

static double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Everything goes to the file, with seconds; warnings and worse to the terminal.
struct Logger : ILogger {
  FILE* file = nullptr;
  Clock::time_point start = Clock::now();
  void log(Severity severity, char const* message) noexcept override {
    if (file) fprintf(file, "%8.2f %d %s\n", since(start), int(severity), message), fflush(file);
    if (severity <= Severity::kERROR) fprintf(stderr, "[TensorRT %d] %s\n", int(severity), message);
  }
} logger;

static std::vector<char> read(std::string const& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) fail(2, "cannot read " + path);
  std::vector<char> data(file.tellg());
  file.seekg(0);
  file.read(data.data(), data.size());
  return data;
}

// Whole or not at all: a plan that is there is finished.
static void write(std::string const& path, void const* data, size_t size) {
  std::ofstream(path + ".part", std::ios::binary).write(static_cast<char const*>(data), size);
  if (rename((path + ".part").c_str(), path.c_str())) fail(2, "cannot write " + path);
}

static char const* option(int count, char** words, char const* name, char const* otherwise) {
  for (int i = 0; i + 1 < count; ++i)
    if (!strcmp(words[i], name)) return words[i + 1];
  return otherwise;
}

static bool has(int count, char** words, char const* name) {
  return std::any_of(words, words + count, [&](char* word) { return !strcmp(word, name); });
}

static std::vector<int> numbers(std::string const& text) {
  std::vector<int> out;
  std::stringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) out.push_back(atoi(item.c_str()));
  return out;
}

static char const* name_of(DataType type) {
  static char const* const names[] = {"FP32", "FP16", "INT8", "INT32", "BOOL", "UINT8"};
  return names[int(type)];
}

static size_t bytes_of(DataType type) {
  return type == DataType::kFLOAT || type == DataType::kINT32 ? 4 : type == DataType::kHALF ? 2 : 1;
}

static std::string text_of(Dims dims) {
  std::string text = "[";
  for (int i = 0; i < dims.nbDims; ++i) text += (i ? "," : "") + std::to_string(dims.d[i]);
  return text + "]";
}

static Dims with_tiles(Dims dims, int tiles) {
  dims.d[0] = tiles;
  return dims;
}

static size_t bytes_of_one(Dims dims, DataType type) {
  size_t bytes = bytes_of(type);
  for (int i = 1; i < dims.nbDims; ++i) bytes *= dims.d[i];
  return bytes;
}

// Each layer that computes keeps the type of its output in the graph; what only moves data, and plugins, are left to TensorRT.
static void constrain(INetworkDefinition& network) {
  std::map<std::string, int> count;
  for (int i = 0; i < network.getNbLayers(); ++i) {
    ILayer* layer = network.getLayer(i);
    LayerType kind = layer->getType();
    DataType type = layer->getOutput(0)->getType();
    bool moves = kind == LayerType::kSHUFFLE || kind == LayerType::kCONSTANT || kind == LayerType::kSHAPE ||
                 kind == LayerType::kSLICE || kind == LayerType::kGATHER || kind == LayerType::kCONCATENATION ||
                 kind == LayerType::kIDENTITY || kind == LayerType::kPLUGIN_V2;
    if (moves || (type != DataType::kFLOAT && type != DataType::kHALF)) continue;
    layer->setPrecision(type);
    layer->setOutputType(0, type);
    ++count[name_of(type)];
  }
  for (auto const& [type, layers] : count) printf("constrained: %d layers in %s\n", layers, type.c_str());
}

static int build(int count, char** words) {
  std::string onnx = words[2], plan = words[3], mode = words[4], cache_file = option(count, words, "--cache", "");
  char const* log = option(count, words, "--log", nullptr);
  if (log) logger.file = fopen(log, "w");
  if (mode != "free" && mode != "typed" && mode != "tf32") fail(2, mode + " is no mode");
  // SIGTERM is for one thread alone; those of the driver inherit this.
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &term, nullptr);

  auto start = Clock::now();
  std::unique_ptr<IBuilder> builder{createInferBuilder(logger)};
  if (!builder) fail(4, "no builder: is there a GPU, and TensorRT's libraries beside libnvinfer?");
  printf("builder ready in %.1f s\n", since(start));
  int threads = atoi(option(count, words, "--threads", "1"));
  if (threads > 1) printf("threads %d: %s\n", threads, builder->setMaxThreads(threads) ? "set" : "refused");
  uint32_t explicit_batch = 1U << uint32_t(NetworkDefinitionCreationFlag::kEXPLICIT_BATCH);
  std::unique_ptr<INetworkDefinition> network{builder->createNetworkV2(explicit_batch)};
  std::unique_ptr<nvonnxparser::IParser> parser{nvonnxparser::createParser(*network, logger)};
  if (!parser->parseFromFile(onnx.c_str(), int(ILogger::Severity::kWARNING))) {
    for (int i = 0; i < parser->getNbErrors(); ++i)
      fprintf(stderr, "node %d: %s\n", parser->getError(i)->node(), parser->getError(i)->desc());
    fail(5, "cannot parse " + onnx);
  }
  ITensor* tiles = network->getInput(0);
  Dims shape = tiles->getDimensions();
  ITensor* rows = network->getOutput(0);
  printf("parsed: %d layers, %s %s -> %s %s\n", network->getNbLayers(), name_of(tiles->getType()), text_of(shape).c_str(),
         name_of(rows->getType()), text_of(rows->getDimensions()).c_str());

  std::unique_ptr<IBuilderConfig> config{builder->createBuilderConfig()};
  config->setMemoryPoolLimit(MemoryPoolType::kWORKSPACE, size_t(8) << 30);
  config->setProfilingVerbosity(ProfilingVerbosity::kDETAILED);
  config->setAvgTimingIterations(1);
  if (mode != "tf32") config->setFlag(BuilderFlag::kFP16);
  if (mode == "typed") config->setFlag(BuilderFlag::kOBEY_PRECISION_CONSTRAINTS), constrain(*network);
  if (has(count, words, "--heuristic")) config->setFlag(BuilderFlag::kENABLE_TACTIC_HEURISTIC);
  if (has(count, words, "--faster")) config->setPreviewFeature(PreviewFeature::kFASTER_DYNAMIC_SHAPES_0805, true);
  if (char const* mask = option(count, words, "--tactics", nullptr))
    if (!config->setTacticSources(strtoul(mask, nullptr, 0))) fail(2, std::string("--tactics refused: ") + mask);
  if (shape.d[0] == -1) {
    auto sizes = numbers(option(count, words, "--tiles", "1,8,32"));
    if (sizes.size() != 3) fail(2, "--tiles wants three numbers");
    IOptimizationProfile* profile = builder->createOptimizationProfile();
    profile->setDimensions(tiles->getName(), OptProfileSelector::kMIN, with_tiles(shape, sizes[0]));
    profile->setDimensions(tiles->getName(), OptProfileSelector::kOPT, with_tiles(shape, sizes[1]));
    profile->setDimensions(tiles->getName(), OptProfileSelector::kMAX, with_tiles(shape, sizes[2]));
    if (config->addOptimizationProfile(profile) < 0) fail(6, "the profile is refused");
    printf("profile %d, %d, %d tiles\n", sizes[0], sizes[1], sizes[2]);
  }
  std::unique_ptr<ITimingCache> cache;
  if (!cache_file.empty()) {
    std::vector<char> old;
    if (std::ifstream(cache_file)) old = read(cache_file);
    cache.reset(config->createTimingCache(old.data(), old.size()));
    printf("timing cache of %zu bytes: %s\n", old.size(), config->setTimingCache(*cache, false) ? "set" : "refused");
  }
  auto keep_cache = [&] {
    if (!cache) return;
    std::unique_ptr<IHostMemory> data{config->getTimingCache()->serialize()};
    if (data) write(cache_file, data->data(), data->size());
  };
  std::thread([&] {
    int number;
    sigwait(&term, &number);
    fprintf(stderr, "trtprobe: ended after %.0f s\n", since(start));
    keep_cache();
    _exit(124);
  }).detach();
  fflush(stdout);

  start = Clock::now();
  std::unique_ptr<IHostMemory> built{builder->buildSerializedNetwork(*network, *config)};
  if (!built) fail(7, "no plan was built");
  write(plan, built->data(), built->size());
  printf("PLAN %s: %.1f MB, mode %s, built in %.1f s\n", plan.c_str(), built->size() / 1e6, mode.c_str(), since(start));
  fflush(stdout);
  keep_cache();
  return 0;
}

struct Plan {
  std::unique_ptr<IRuntime> runtime{createInferRuntime(logger)};
  std::unique_ptr<ICudaEngine> engine;
  std::unique_ptr<IExecutionContext> context;
  std::string tiles, rows;
  Dims shape;
  DataType type;
  size_t tile_bytes, row_bytes;  // of one tile
  int least, most;
  bool fixed;  // the graph itself names the number of tiles
  void *given, *out;
  cudaStream_t stream;

  explicit Plan(std::string const& path) {
    auto data = read(path);
    if (!runtime) fail(4, "no runtime");
    auto start = Clock::now();
    engine.reset(runtime->deserializeCudaEngine(data.data(), data.size()));
    if (engine) context.reset(engine->createExecutionContext());
    if (!context) fail(4, path + " does not load");
    printf("LOADED in %.2f s, device memory %.0f MB\n", since(start), engine->getDeviceMemorySize() / 1e6);
    for (int i = 0; i < engine->getNbIOTensors(); ++i) {
      char const* name = engine->getIOTensorName(i);
      (engine->getTensorIOMode(name) == TensorIOMode::kINPUT ? tiles : rows) = name;
    }
    shape = engine->getTensorShape(tiles.c_str());
    type = engine->getTensorDataType(rows.c_str());
    tile_bytes = bytes_of_one(shape, engine->getTensorDataType(tiles.c_str()));
    row_bytes = bytes_of_one(engine->getTensorShape(rows.c_str()), type);
    fixed = shape.d[0] != -1;
    least = fixed ? shape.d[0] : engine->getProfileShape(tiles.c_str(), 0, OptProfileSelector::kMIN).d[0];
    most = fixed ? shape.d[0] : engine->getProfileShape(tiles.c_str(), 0, OptProfileSelector::kMAX).d[0];
    CUDA(cudaMalloc(&given, tile_bytes * most));
    CUDA(cudaMalloc(&out, row_bytes * most));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    context->setTensorAddress(tiles.c_str(), given);
    context->setTensorAddress(rows.c_str(), out);
  }
  bool set(int count) { return fixed ? count == most : context->setInputShape(tiles.c_str(), with_tiles(shape, count)); }
  void enqueue() {
    if (!context->enqueueV3(stream)) fail(8, "the plan does not run");
  }
  // The tiles from `first` on, again and again.
  void fill(std::vector<char> const& all, size_t first, int count) {
    size_t there = all.size() / tile_bytes;
    for (int i = 0; i < count; ++i)
      CUDA(cudaMemcpy(static_cast<char*>(given) + i * tile_bytes, all.data() + (first + i) % there * tile_bytes, tile_bytes,
                      cudaMemcpyHostToDevice));
  }
};

static int run(int, char** words) {
  Plan plan(words[2]);
  auto tiles = read(words[3]);
  int total = atoi(words[4]);
  std::vector<char> rows(total * plan.row_bytes);
  for (int at = 0; at < total; at += plan.most) {
    int wanted = std::min(plan.most, total - at), count = std::max(wanted, plan.least);
    plan.fill(tiles, at, count);
    if (!plan.set(count)) fail(8, std::to_string(count) + " tiles are refused");
    plan.enqueue();
    CUDA(cudaStreamSynchronize(plan.stream));
    CUDA(cudaMemcpy(rows.data() + at * plan.row_bytes, plan.out, wanted * plan.row_bytes, cudaMemcpyDeviceToHost));
  }
  write(words[5], rows.data(), rows.size());
  printf("RAN %d tiles, %d at once at most: %zu bytes of %s\n", total, plan.most, rows.size(), name_of(plan.type));
  return 0;
}

static int timing(int, char** words) {
  Plan plan(words[2]);
  plan.fill(read(words[3]), 0, plan.most);
  int iterations = atoi(words[5]);
  cudaEvent_t begin, end;
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  for (int count : numbers(words[4])) {
    if (count > plan.most || count < plan.least || !plan.set(count)) continue;
    plan.enqueue();
    CUDA(cudaStreamSynchronize(plan.stream));
    for (bool captured : {false, true}) {
      cudaGraphExec_t recorded = nullptr;
      if (captured) {
        cudaGraph_t graph = nullptr;
        CUDA(cudaStreamBeginCapture(plan.stream, cudaStreamCaptureModeThreadLocal));
        plan.enqueue();
        CUDA(cudaStreamEndCapture(plan.stream, &graph));
        CUDA(cudaGraphInstantiate(&recorded, graph, nullptr, nullptr, 0));
      }
      auto once = [&] {
        if (captured)
          CUDA(cudaGraphLaunch(recorded, plan.stream));
        else
          plan.enqueue();
      };
      for (int i = 0; i < 10; ++i) once();
      std::vector<float> each(iterations);
      for (float& ms : each) {
        CUDA(cudaEventRecord(begin, plan.stream));
        once();
        CUDA(cudaEventRecord(end, plan.stream));
        CUDA(cudaEventSynchronize(end));
        CUDA(cudaEventElapsedTime(&ms, begin, end));
      }
      std::sort(each.begin(), each.end());
      float all;
      CUDA(cudaEventRecord(begin, plan.stream));
      for (int i = 0; i < iterations; ++i) once();
      CUDA(cudaEventRecord(end, plan.stream));
      CUDA(cudaEventSynchronize(end));
      CUDA(cudaEventElapsedTime(&all, begin, end));
      printf("TIME %d tiles, %s: median %.3f ms, least %.3f; back to back %.3f ms, %.0f tiles/s\n", count,
             captured ? "CUDA graph" : "enqueued", each[iterations / 2], each[0], all / iterations,
             count * 1e3 * iterations / all);
      fflush(stdout);
    }
  }
  return 0;
}

static int layers(int, char** words) {
  Plan plan(words[2]);
  std::unique_ptr<IEngineInspector> inspector{plan.engine->createEngineInspector()};
  std::string text = inspector->getEngineInformation(LayerInformationFormat::kJSON);
  write(words[3], text.data(), text.size());
  printf("LAYERS %d in %s\n", plan.engine->getNbLayers(), words[2]);
  return 0;
}

int main(int count, char** words) {
  std::string step = count > 1 ? words[1] : "";
  initLibNvInferPlugins(&logger, "");
  if (step == "build" && count >= 5) return build(count, words);
  if (step == "run" && count == 6) return run(count, words);
  if (step == "time" && count == 6) return timing(count, words);
  if (step == "layers" && count == 4) return layers(count, words);
  fail(2, "usage: see the first lines of trtprobe.cc");
}
