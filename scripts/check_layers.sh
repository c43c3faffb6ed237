#!/usr/bin/env bash
# Who may include whom: the layers of the source, checked from its #include lines.
#
#   scripts/check_layers.sh [ROOT]         exit 1 and one line per include that breaks a rule
#   scripts/check_layers.sh --self-test    shows on small trees that every rule is enforced
#
# A file belongs to a module by its name: kernels/norm_cpu.cpp to the operation norm (whose contract is kernels/norm.h),
# trainer/config_toml.cpp to config, dataloader/* to dataloader. A module may include itself and what `may` lists.
# test/ and dev/ include anything and are included by nothing.
set -u

leaves="config model_config schedule batch_plan step_limit collectives channel launch files monitor layer_hooks"
declare -A may=(
  [common]=""
  [op]="common"  # another operation is out of bounds
  [data_state]="common"
  [dataloader]="common data_state"
  [parameters]="common op model_config"
  [flops]="common op model_config"
  [one_rank]="common op parameters layer_hooks"
  [model]="common op model_config parameters flops"
  [forward]="common op model_config parameters flops model layer_hooks"
  # These run the forward pass, or parts of it again.
  [backward]="common op model_config parameters flops model layer_hooks forward"
  [eval]="common op model_config parameters flops model layer_hooks forward collectives"
  [sample]="common op model_config parameters flops model layer_hooks forward"
  [plan]="common op $leaves parameters flops model"
  [sharding]="common op parameters collectives layer_hooks"
  [health]="common collectives"
  [optimizer]="common op model_config parameters flops model collectives sharding health"
  [safetensors]="common files"
  [gemm_choices]="common files"
  [tables]="common model_config config flops dataloader data_state"
  [feed]="common op model_config parameters model layer_hooks forward eval collectives dataloader data_state"
  [resume]="common op model_config parameters flops model optimizer sharding config files checkpoint data_state"
  [inspect]="common op model_config parameters config files safetensors checkpoint tables dataloader data_state"
  [inference]="common op model_config parameters model layer_hooks forward eval sample feed collectives optimizer one_rank tables config files import checkpoint dataloader data_state"
  [saving]="common op model_config parameters model optimizer config files checkpoint monitor channel data_state"
  [run_setup]="common op model_config parameters config files channel checkpoint resume import inference tables model optimizer layer_hooks dataloader data_state"
  [ranks]="common collectives channel launch config gemm_choices data_state"
  [run_memory]="common op model_config parameters model optimizer sharding run_setup config tables sample dataloader"
  [run_directory]="common config files checkpoint monitor channel launch run_setup run_reports"
  [run_reports]="common model_config config flops eval monitor channel launch run_setup tables dataloader"
  [import]="common model_config parameters files safetensors"
  [checkpoint]="common op model_config parameters files safetensors channel data_state"
)
for leaf in $leaves; do may[$leaf]="common"; done
may[launch]="common channel"
# Operations that end in another one, which the library may do in the same pass.
declare -A ends_in=([op:matmul]="op:activation")
may[main]="data_state dataloader ${!may[*]}"

# Sets `found` to the module of a path, to "" for a path that belongs to none.
find_module() {
  local stem=${1##*/} prefix="" part
  stem=${stem%%.*}
  found=""
  case $1 in
    train_gpt.cu) found=main ;;
    kernels/common/*) found=common ;;
    kernels/*/*) ;;
    kernels/*)  # the shortest prefix that is a contract
      for part in ${stem//_/ }; do
        prefix=${prefix:+${prefix}_}$part
        if [ -e "kernels/$prefix.h" ]; then
          found=op:$prefix
          return
        fi
      done ;;
    dataloader/data_state.*) found=data_state ;;
    dataloader/*) found=dataloader ;;
    trainer/*)  # the longest prefix that is a module
      while [ -z "${may[$stem]+x}" ] && [[ $stem == *_* ]]; do stem=${stem%_*}; done
      [ -n "${may[$stem]+x}" ] && [[ $stem != common && $stem != op && $stem != main ]] && found=$stem ;;
  esac
}

broken=0
break_rule() {
  echo "$1: $2"
  broken=$((broken + 1))
}

check_include() {  # FILE LINE MODULE INCLUDED, <INCLUDED> for system headers
  local where=$1:$2 module=$3 header=$4
  case $header in
    "<"*)
      case $header in
        "<cuda"* | "<cublas"* | "<nccl"* | "<nvml"* | "<mma.h>" | "<cooperative_groups"* | "<cub/"* | "<thrust/"* | "<driver_types.h>")
          case $1 in
            train_gpt.cu) break_rule "$where" "train_gpt.cu is host code: no $header" ;;
            *.cu | *.cuh | trainer/collectives_nccl.*) ;;
            *) break_rule "$where" "only .cu and .cuh files and collectives_nccl see CUDA headers, not $header" ;;
          esac ;;
        "<mpi"*)
          case $1 in
            trainer/collectives_mpi.* | trainer/launch*) ;;
            *) break_rule "$where" "only collectives_mpi and launch see MPI, not $header" ;;
          esac ;;
        "<CLI/"*) [ "$module" = config ] || break_rule "$where" "only config sees CLI11, not $header" ;;
      esac
      return ;;
    *.cuh)
      case $1 in
        train_gpt.cu) break_rule "$where" "train_gpt.cu is host code: no $header" ;;
        *.cu | *.cuh) ;;
        *) break_rule "$where" "$header is for .cu and .cuh files" ;;
      esac ;;
  esac
  if [ ! -e "$header" ]; then
    break_rule "$where" "\"$header\" is not a path from the root of the repository"
    return
  fi
  find_module "$header"
  [ "$found" = "$module" ] && return
  [ -n "$found" ] && [ "$found" = "${ends_in[$module]:-}" ] && return
  case " ${may[${module%%:*}]} " in
    *" ${found%%:*} "*) [ -n "$found" ] && return ;;
  esac
  break_rule "$where" "$module may not include $header; it may include: ${may[${module%%:*}]:-nothing}"
}

check_tree() {
  local file line text files
  declare -A module_of=()
  mapfile -t files < <(find kernels dataloader trainer train_gpt.cu -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | LC_ALL=C sort)
  for file in "${files[@]}"; do
    find_module "$file"
    module_of[$file]=$found
    [ -n "$found" ] || break_rule "$file" "belongs to no module: an operation needs kernels/NAME.h, a module of trainer/ a row in scripts/check_layers.sh"
  done
  while IFS=: read -r file line text; do
    [ -n "${module_of[$file]}" ] || continue
    if [[ $text =~ ^[^\"\<]*(\"([^\"]*)\"|\<[^\>]*\>) ]]; then
      check_include "$file" "$line" "${module_of[$file]}" "${BASH_REMATCH[2]:-${BASH_REMATCH[1]}}"
    else
      break_rule "$file:$line" "an #include that cannot be read"
    fi
  done < <(grep -HnE '^[[:space:]]*#[[:space:]]*include' "${files[@]}")
}

# Each case: a file, what it includes, and for deny a part of the refusal.
self_test() {
  local tree file good=0 bad=0 said
  tree=$(mktemp -d) || exit 2
  # shellcheck disable=SC2064
  trap "rm -rf '$tree'" EXIT
  mkdir -p "$tree"/{kernels/common,dataloader,trainer,test}
  for file in kernels/common/check.h kernels/{norm.h,norm_cpu.cpp,norm.cu,norm_warp.cuh,rope.h,global_norm.h,global_norm_cpu.cpp} kernels/{matmul,activation}.h \
    dataloader/{loader,data_state}.h trainer/{model_config,model_config_json,parameters,flops,model,forward,backward}.h \
    trainer/{optimizer,eval,config,config_toml,schedule,files,safetensors,checkpoint,layer_hooks,sharding}.h \
    trainer/{collectives,collectives_mpi,collectives_nccl}.h train_gpt.cu test/any_test.cpp; do echo >"$tree/$file"; done
  refused() { (cd "$tree" && broken=0 && check_tree && exit "$broken"); }
  with() {  # FILE LINE: sets `said` to the refusal of a tree in which FILE has LINE
    echo "#include $2" >>"$tree/$1"
    said=$(refused) && said=""
    echo >"$tree/$1"
  }
  allow() {
    with "$1" "$2"
    if [ -z "$said" ]; then good=$((good + 1)); else bad=$((bad + 1)); echo "refused wrongly: $said"; fi
  }
  deny() {
    with "$1" "$2"
    case $said in
      "$1:2: "*"$3"*) good=$((good + 1)) ;;
      *) bad=$((bad + 1)); echo "not refused: $1 with $2 (said: ${said:-nothing})" ;;
    esac
  }
  allow kernels/norm_cpu.cpp '"kernels/norm.h"'
  allow kernels/norm_cpu.cpp '"kernels/common/check.h"  // why'
  allow kernels/global_norm_cpu.cpp '"kernels/global_norm.h"'
  allow kernels/matmul.h '"kernels/activation.h"'
  allow kernels/norm.cu '<cuda_runtime.h>'
  allow kernels/norm.cu '"kernels/norm_warp.cuh"'
  allow trainer/model_config_json.h '"trainer/model_config.h"'
  allow trainer/eval.h '"trainer/forward.h"'
  allow trainer/checkpoint.h '"dataloader/data_state.h"'
  allow trainer/collectives_mpi.h '<mpi.h>'
  allow trainer/config_toml.h '<CLI/CLI.hpp>'
  allow train_gpt.cu '"trainer/optimizer.h"'
  allow train_gpt.cu '"dataloader/loader.h"'
  allow test/any_test.cpp '"trainer/optimizer.h"'
  deny kernels/common/check.h '"kernels/norm.h"' "common may not include"
  deny kernels/norm.h '"kernels/rope.h"' "op:norm may not include"
  deny kernels/norm.h '"kernels/activation.h"' "op:norm may not include"
  deny kernels/activation.h '"kernels/matmul.h"' "op:activation may not include"
  deny kernels/global_norm_cpu.cpp '"kernels/norm.h"' "op:global_norm may not include"
  deny kernels/norm.h '"trainer/model.h"' "may not include"
  deny kernels/norm.h '"norm_warp.cuh"' "is for .cu"
  deny kernels/norm_cpu.cpp '"norm.h"' "not a path from the root"
  deny kernels/norm_cpu.cpp '<cuda_runtime.h>' "CUDA headers"
  deny trainer/model.h '<nccl.h>' "CUDA headers"
  deny train_gpt.cu '<cuda_runtime.h>' "host code"
  deny train_gpt.cu '"kernels/norm_warp.cuh"' "host code"
  deny train_gpt.cu '<mpi.h>' "see MPI"
  deny train_gpt.cu '<CLI/CLI.hpp>' "CLI11"
  deny trainer/parameters.h '"trainer/model.h"' "parameters may not include"
  deny trainer/model.h '"trainer/forward.h"' "model may not include"
  deny trainer/forward.h '"trainer/backward.h"' "forward may not include"
  deny trainer/schedule.h '"trainer/config.h"' "schedule may not include"
  deny trainer/model.h '"dataloader/loader.h"' "model may not include"
  deny trainer/checkpoint.h '"dataloader/loader.h"' "checkpoint may not include"
  deny dataloader/loader.h '"trainer/files.h"' "dataloader may not include"
  deny trainer/sharding.h '"trainer/optimizer.h"' "sharding may not include"
  deny trainer/model.h '"test/any_test.cpp"' "model may not include"
  deny trainer/model.h '"train_gpt.cu"' "model may not include"
  echo >"$tree/trainer/novelty.h"
  echo >"$tree/kernels/orphan_cpu.cpp"
  said=$(refused)
  case $said in
    *"kernels/orphan_cpu.cpp: belongs to no module"*"trainer/novelty.h: belongs to no module"*) good=$((good + 1)) ;;
    *) bad=$((bad + 1)); echo "files of no module were not refused: $said" ;;
  esac
  echo "layers self-test: $good right, $bad wrong"
  [ "$bad" -eq 0 ]
}

case ${1:-} in
  --self-test) self_test ;;
  *)
    cd "${1:-$(dirname "$0")/..}" || exit 2
    check_tree
    [ "$broken" -eq 0 ] && echo "layers: clean" || { echo "layers: $broken includes break the rules"; exit 1; } ;;
esac
